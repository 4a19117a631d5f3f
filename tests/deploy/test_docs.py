"""What the documents tell people to type exists."""

import importlib.util
import re
from pathlib import Path

import pytest
from prefect.settings import Settings
from prefect.settings.legacy import _get_valid_setting_names as setting_names

from tests.conftest import ROOT
from tests.deploy.shell import commands_of, fault_of

# pyright: reportMissingImports=false

OPERATIONS = ROOT / "docs" / "operations.md"
DOCUMENTS = [ROOT / "README.md", ROOT / "flows" / "README.md", *sorted(ROOT.glob("docs/*.md"))]
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
