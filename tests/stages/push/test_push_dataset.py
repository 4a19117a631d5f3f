"""Prepared data pushed to a stand-in of the hub on loopback, and loaded back with `datasets`."""

import json
import os
import subprocess
import sys
import threading
from functools import partial

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants

from penstock.config.loading.load import loads
from penstock.core.cache.stage import short
from penstock.core.cache.store import PlannedStage, get_or_build
from penstock.core.errors import ArtifactError, CapabilityError, StageError
from penstock.pipeline.plan import RebuildOptions, execute_stage, plan
from penstock.prepare.stage import Prepare
from penstock.push.dataset import push_dataset
from tests.pipeline.runs import write_chats, write_run
from tests.stages.prepared import prepare, table_of, texts, write_lines
from tests.stages.push.hub_stand_in import Hub, running
from tests.turns import one_day_in

# The client's own way to send a file, which its HTTP library calls old.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")

TOKEN = "hf_planted0123456789"
REPO = "someone/data"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    state = Hub(TOKEN, kind="dataset")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with running(state) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        at = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", at)
        yield state
        huggingface_hub.close_session()


@pytest.fixture
def prepared(tmp_path):
    return partial(sealed, tmp_path)


def sealed(folder, word="t", **settings):
    """A sealed artifact of forty texts, four of them held out unless `settings` say otherwise."""
    source = write_lines(folder / word / "rows.jsonl", texts(40, word))
    stage = prepare((source, {"type": "text"}), **{"val_set_size": 4, **settings})
    step = PlannedStage(stage, folder / word / "prepare")
    get_or_build(step)
    return step.artifact


def loaded(address, configs, home):
    """What `datasets` gives in a process of its own: {config: {split: {column: values}}}."""
    code = (
        "import json, sys\n"
        "from datasets import load_dataset\n"
        "repo, *configs = sys.argv[1:]\n"
        "found = {config: load_dataset(repo, config) for config in configs}\n"
        "plain = {c: {name: split[:] for name, split in found[c].items()} for c in found}\n"
        "print(json.dumps(plain))\n"
    )
    return json.loads(with_hub(address, home, "-c", code, REPO, *configs).splitlines()[-1])


def with_hub(address, home, *command):
    """What Python says in a process of its own that takes the stand-in for the hub."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": address,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_load_dataset_gives_every_pushed_key_as_it_was_prepared(hub, prepared, tmp_path):
    one, other = prepared("one"), prepared("other", val_set_size=None)
    assert push_dataset(one, REPO, file_bytes=1)["status"] == "pushed"
    push_dataset(other, REPO)
    assert hub.created[0] | {"type": "dataset", "visibility": "private"} == hub.created[0]
    keys = [short(artifact.key) for artifact in (one, other)]
    found = loaded(constants.ENDPOINT, keys, tmp_path / "home")
    for artifact, splits in (one, ["train", "validation"]), (other, ["train"]):
        its = found[short(artifact.key)]
        assert sorted(its) == splits
        for split in splits:
            assert its[split] == table_of(artifact.path, split).to_pydict()


def test_a_key_that_is_there_is_not_sent_again(hub, prepared):
    artifact = prepared()
    first = push_dataset(artifact, REPO)
    uploads = len(hub.objects)
    second = push_dataset(artifact, REPO)
    assert (hub.commits, len(hub.objects)) == (1, uploads)
    assert (first["status"], second["status"]) == ("pushed", "there already")
    assert second["commit"] == first["commit"]


def test_a_card_and_configurations_that_are_there_stay(hub, prepared):
    card = "---\nlicense: mit\nconfigs:\n- config_name: mine\n  data_files: mine.csv\n---\n# Mine\n"
    theirs = {"README.md": card.encode(), "mine.csv": b"a\n1\n"}
    hub.created.append({})
    hub.branches["main"] = [{}, dict(theirs)]
    artifact = prepared()
    key = short(artifact.key)
    push_dataset(artifact, REPO)
    tree = hub.tree()
    _, header, body = tree["README.md"].decode().split("---\n")
    header = yaml.safe_load(header)
    assert body == "# Mine\n"
    assert header["license"] == "mit"
    assert header["configs"] == [
        {"config_name": "mine", "data_files": "mine.csv"},
        {
            "config_name": key,
            "data_files": [
                {"split": "train", "path": f"{key}/train-*.parquet"},
                {"split": "validation", "path": f"{key}/validation-*.parquet"},
            ],
        },
    ]
    assert tree["mine.csv"] == theirs["mine.csv"]


def test_two_pushes_at_once_both_end_in_the_card(hub, prepared):
    artifacts = [prepared("one"), prepared("other")]
    both = [threading.Thread(target=push_dataset, args=(each, REPO)) for each in artifacts]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    header = yaml.safe_load(hub.tree()["README.md"].decode().split("---\n")[1])
    named = {each["config_name"] for each in header["configs"]}
    assert named == {short(each.key) for each in artifacts}


def test_data_is_not_pushed_into_the_open_or_over_data_without_a_name(hub, prepared):
    hub.created.append({})
    hub.branches["main"] = [{}, {"rows.csv": b"a\n1\n"}]
    hub.public = True
    with pytest.raises(CapabilityError, match="someone/data is a public data set"):
        push_dataset(prepared(), REPO)
    hub.public = False
    with pytest.raises(CapabilityError, match="no configuration in its card lists"):
        push_dataset(prepared(), REPO)
    assert hub.commits == 1


def test_what_a_machine_is_called_and_what_rows_said_stays_at_home(hub, prepared):
    artifact = prepared()
    push_dataset(artifact, REPO)
    record = json.loads(hub.tree()[f"{short(artifact.key)}/penstock.json"])
    assert record["key"] == artifact.key
    assert record["facts"]["rows"] == {"train": 36, "validation": 4}
    assert {"host", "created", "code"}.isdisjoint(record)
    assert "dropped_samples" not in record["facts"]


def test_samples_that_changed_since_they_were_sealed_are_not_sent(hub, prepared):
    artifact = prepared()
    file = next(artifact.path.glob("data/train/*.arrow"))
    content = file.read_bytes()
    file.write_bytes(content[:900] + bytes([content[900] ^ 1]) + content[901:])
    with pytest.raises(ArtifactError, match="has changed since it was finished"):
        push_dataset(artifact, REPO)
    assert hub.commits == 0


def test_a_failing_hub_says_so_without_the_token_and_the_next_push_is_whole(hub, prepared):
    artifact = prepared()
    hub.answer["/commit/main"] = (500, f"out of order, {TOKEN}")
    with pytest.raises(StageError, match="HTTP 500") as failure:
        push_dataset(artifact, REPO)
    assert TOKEN not in str(failure.value)
    hub.answer.clear()
    assert push_dataset(artifact, REPO)["status"] == "pushed"


def config(folder, **data):
    return loads(
        {
            "model": {"config_path": "builtin:tiny-qwen3"},
            "data": {
                "datasets": [{"path": str(folder / "chats.jsonl"), "type": "chat"}],
                "dataset_prepared_path": str(folder / "prepared"),
                **data,
            },
            "train": {"output_dir": str(folder / "out")},
        }
    )


def pushing(folder):
    return config(folder, push_dataset_to_hub=REPO, hf_use_auth_token=True)


def test_a_run_pushes_what_it_prepared_and_its_seal_does_not_know(hub, tmp_path):
    write_chats(tmp_path / "chats.jsonl")
    said = []
    for status, expected in ("ran", "pushed"), ("cached", "there already"):
        made = plan(pushing(tmp_path), ("prepare",))
        outcome = execute_stage(made.steps[0], made.run, RebuildOptions(), said.append)
        assert outcome.status == status
        assert outcome.facts["hub"]["status"] == expected
        assert "hub" not in made.steps[0].artifact.facts
    assert f"{outcome.key}/penstock.json" in hub.tree()
    assert [line for line in said if REPO in line and outcome.key in line]
    assert plan(config(tmp_path), ("prepare",)).steps[0].artifact.key[:16] == outcome.key


def test_without_a_login_or_offline_nothing_begins(hub, tmp_path, monkeypatch):
    write_chats(tmp_path / "chats.jsonl")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CapabilityError, match="HF_HUB_OFFLINE is set"):
        plan(pushing(tmp_path), ("prepare",))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("HF_TOKEN")
    for run in pushing(tmp_path), config(tmp_path, hf_use_auth_token=True):
        with pytest.raises(CapabilityError, match="hf auth login"):
            plan(run, ("prepare",))
    assert hub.requests == []


@pytest.mark.parametrize(
    ("written", "sent"),
    [(None, f"Bearer {TOKEN}"), (True, f"Bearer {TOKEN}"), (False, None)],
)
def test_the_login_goes_to_the_hub_as_written(written, sent, hub, tmp_path):
    hub.public = True
    hub.branches["main"] = [{"rows.jsonl": b'{"text": "one"}\n'}]
    data = {"datasets": [{"path": REPO, "type": "text"}], "hf_use_auth_token": written}
    stage = plan(config(tmp_path, **data), ("prepare",)).steps[0].stage
    assert isinstance(stage, Prepare)
    assert stage.sources[0].pin["commit"] == hub.head("main")
    # The hub's library also asks, once a process and without a login, what it is driven by.
    asked = zip(hub.requests, hub.authorizations, strict=True)
    assert {login for (_, path), login in asked if REPO in path} == {sent}


@one_day_in(2, of=1)
def test_records_of_the_hub_are_read_without_the_login_if_so_written(hub, tmp_path):
    hub.public = True
    rows = b"".join(json.dumps(row).encode() + b"\n" for row in texts(20))
    hub.branches["main"] = [{"rows.jsonl": rows}]
    run = write_run(
        tmp_path,
        data={"datasets": [{"path": REPO, "type": "text"}], "hf_use_auth_token": False},
        pipeline={"stages": ["prepare"]},
    )
    words = ("-m", "penstock.cli.main", "prepare", str(run), "--json")
    said = with_hub(constants.ENDPOINT, tmp_path / "home", *words)
    [stage] = json.loads(said.splitlines()[-1])["stages"]
    assert stage["facts"]["rows"] == {"train": 16, "validation": 4}
    assert [path for _, path in hub.requests if path.endswith("/rows.jsonl")]
    assert set(hub.authorizations) == {None}
