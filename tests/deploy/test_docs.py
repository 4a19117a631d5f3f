"""What the documents tell people to type exists."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from prefect.settings import Settings
from prefect.settings.legacy import _get_valid_setting_names as setting_names

from tests.cli.command import penstock
from tests.conftest import ROOT
from tests.deploy.shell import commands_of, fault_of

# pyright: reportMissingImports=false

OPERATIONS = ROOT / "docs" / "guide" / "operations.md"
DOCUMENTS = [ROOT / "README.md", ROOT / "flows" / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
TINY = "config_path: builtin:tiny-qwen3"
DEPLOYED = [ROOT / "Dockerfile", ROOT / "prefect.yaml", *sorted(ROOT.glob("deploy/**/*.*"))]


def source_of(module):
    found = importlib.util.find_spec(module)
    assert found
    assert found.origin
    return Path(found.origin).read_text()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_of_a_document_is_one_that_the_installed_programs_take(path):
    text = path.read_text()
    commands = list(commands_of(text, inline=path == OPERATIONS))
    faults = {" ".join(command): fault for command in commands if (fault := fault_of(command))}
    assert faults == {}
    if path == OPERATIONS:
        programs = [command[0] for command in commands]
        assert programs.count("prefect") > 30
        assert programs.count("penstock") > 5


@pytest.mark.parametrize(
    "line",
    [
        "prefect work-pool set-concurrency-limit penstock",
        "prefect worker start --pool penstock --limits 1",
        "prefect work-pool lst",
        "penstock artifacts prun",
        "penstock run",
        "X=1 penstock plan run.yaml --train.learning_rate 1",
        "penstock artifacts prune --keep 3",
        "docker compose exec worker prefect deployment runs a/b",
        "true && sudo /usr/bin/prefect automation create --file x",
    ],
)
def test_a_command_that_does_not_exist_is_found_wherever_it_stands(line):
    commands = list(commands_of(f"```sh\n{line}   # says why\n```\n"))
    assert [fault_of(command) for command in commands if fault_of(command)]


def test_every_setting_of_prefect_that_is_named_is_one():
    known = {name.upper() for name in setting_names(Settings)}
    # Read by Prefect past its settings.
    known |= set(re.findall(r"PREFECT_\w+", source_of("prefect.server.utilities.encryption")))
    if importlib.util.find_spec("prefect_kubernetes"):
        from prefect_kubernetes.settings import KubernetesSettings

        known |= {name.upper() for name in setting_names(KubernetesSettings)}
    else:
        known |= {
            f"PREFECT_INTEGRATIONS_KUBERNETES_{name}"
            for name in (
                "CLUSTER_UID",
                "OBSERVER_NAMESPACES",
                "WORKER_API_AUTH_STRING_SECRET_KEY",
                "WORKER_API_AUTH_STRING_SECRET_NAME",
            )
        }
    named = {
        name
        for path in (*DOCUMENTS, *DEPLOYED)
        for name in re.findall(r"\bPREFECT_[A-Z_]*[A-Z]\b(?!_?\*)", path.read_text())
    }
    assert named - known == set()


def test_every_file_that_operations_refers_to_is_there():
    text = OPERATIONS.read_text()
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert len(links) > 10
    assert [link for link in links if not (OPERATIONS.parent / link).exists()] == []
    anchors = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", text)
    for link, anchor in anchors:
        titles = re.findall(
            r"^#+ (.*)$", (OPERATIONS.parent / link).read_text() if link else text, re.M
        )
        made = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert anchor in made, f"{link}#{anchor}"
    paths = re.findall(r"\bdeploy/[\w./-]+\w", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", ["own-data", "preference", "recurring"])
def test_the_first_config_of_a_document_is_a_whole_file_that_check_takes(
    document, tmp_path, monkeypatch
):
    said = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    pair = {"prompt": said[:1], "chosen": said[1:], "rejected": [{**said[1], "content": "5"}]}
    (tmp_path / "data" / "chats").mkdir(parents=True)
    for name in ("chats.jsonl", "data/chats/1.jsonl", "data/held-out.jsonl"):
        (tmp_path / name).write_text(f"{json.dumps({'messages': said})}\n" * 3)
    (tmp_path / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "guide" / f"{document}.md").read_text()
    found = re.search(r"```yaml\n(.*?)```", text, re.S)
    assert found
    Path("run.yaml").write_text(found[1].replace("model_path: Qwen/Qwen3-0.6B", TINY))
    checked = penstock("check", "run.yaml")
    assert checked.code == 0, checked.out + checked.err
    assert "not looked at" not in checked.out + checked.err
