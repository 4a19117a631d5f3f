"""Pushing to the hub, through huggingface_hub's own client, to a stand-in on loopback."""

import json
import logging

import huggingface_hub
import pytest
from huggingface_hub import constants

from penstock.core.cache.record import write_record
from penstock.core.cache.stage import Artifact, stage_key
from penstock.core.errors import ArtifactError, CapabilityError, StageError
from penstock.core.files import regular_files
from penstock.push.stage import Push, PushSettings
from tests.stages.exports import sealed_export
from tests.stages.push.hub_stand_in import Hub, running

# The client's own way to send a file, which its HTTP library calls old.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")

TOKEN = "hf_planted0123456789"
MODEL = {
    "hf/config.json": b'{"model_type": "llama"}\n',
    "hf/model.safetensors": bytes(range(256)) * 300,
    "hf/chat_template.jinja": "{{ '→' }}".encode(),
}


@pytest.fixture
def hub(monkeypatch):
    state = Hub(TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # Xet speaks to a storage service of its own; LFS stays on loopback.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with running(state) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        yield state
        huggingface_hub.close_session()


@pytest.fixture
def exported(tmp_path):
    return sealed_export(tmp_path / "export", MODEL)


def push(exported: Artifact, **settings) -> Push:
    return Push(settings=PushSettings(repo_id="someone/model", **settings), exported=exported)


def test_the_repository_holds_the_exported_bytes_and_a_second_push_commits_nothing(
    hub, exported, tmp_path
):
    first = push(exported).run(tmp_path / "first")
    assert hub.tree() == {name.removeprefix("hf/"): MODEL[name] for name in MODEL}
    assert hub.created[0]["visibility"] == "private"
    assert first["sent"] == sorted(hub.tree())

    second = push(exported).run(tmp_path / "second")
    assert hub.commits == 1
    assert second["sent"] == []
    assert second["unchanged"] == first["sent"]
    assert second["commit"] == first["commit"]


def test_a_repository_is_made_a_public_one_only_when_that_is_written(hub, exported, tmp_path):
    push(exported, private=False).run(tmp_path / "out")
    assert hub.created[0]["visibility"] == "public"


def test_only_what_changed_is_committed_again(hub, exported, tmp_path):
    push(exported).run(tmp_path / "first")
    changed = {**MODEL, "hf/config.json": b'{"model_type": "qwen3"}\n'}
    uploads = len(hub.objects)
    facts = push(sealed_export(tmp_path / "other", changed)).run(tmp_path / "second")
    assert facts["sent"] == ["config.json"]
    assert hub.tree()["config.json"] == changed["hf/config.json"]
    assert len(hub.objects) == uploads


def test_weights_that_would_shadow_the_new_ones_are_removed_and_other_files_stay(
    hub, exported, tmp_path
):
    push(exported).run(tmp_path / "first")
    hub.branches["main"].append({**hub.tree(), "README.md": b"mine", "adapter_config.json": b"{}"})
    shards = {
        "hf/config.json": MODEL["hf/config.json"],
        "hf/model-00001-of-00002.safetensors": b"one",
        "hf/model-00002-of-00002.safetensors": b"two",
        "hf/model.safetensors.index.json": b"{}",
    }
    facts = push(sealed_export(tmp_path / "sharded", shards)).run(tmp_path / "second")
    assert facts["removed"] == ["adapter_config.json", "model.safetensors"]
    assert sorted(hub.tree()) == [
        "README.md",
        "chat_template.jinja",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def test_a_push_cut_off_after_its_commit_tells_the_same_when_resumed(hub, exported, tmp_path):
    out = tmp_path / "out"
    whole = push(exported).run(out)
    assert push(exported).run(out) == whole
    assert hub.commits == 1


def test_an_adapter_goes_below_the_model_or_alone_to_the_root(hub, tmp_path):
    both = {**MODEL, "adapter/adapter_config.json": b"{}", "notes.txt": b"not sent"}
    folders = {"hf": "hf", "adapter": "adapter"}
    push(sealed_export(tmp_path / "both", both, folders=folders)).run(tmp_path / "one")
    assert "adapter/adapter_config.json" in hub.tree()
    assert "notes.txt" not in hub.tree()

    alone = sealed_export(tmp_path / "alone", both, folders={"adapter": "adapter"})
    push(alone, revision="adapter-only").run(tmp_path / "two")
    assert hub.tree("adapter-only")["adapter_config.json"] == b"{}"
    assert "adapter_config.json" not in hub.tree("main")


def test_a_pull_request_is_opened_once_and_main_stays(hub, exported, tmp_path):
    first = push(exported, create_pr=True).run(tmp_path / "first")
    second = push(exported, create_pr=True).run(tmp_path / "second")
    assert first["pull_request"].endswith("/someone/model/discussions/1")
    assert second["pull_request"] == first["pull_request"]
    assert len(hub.pulls) == 1
    assert hub.tree("main") == {}
    assert hub.tree("refs/pr/1")["config.json"] == MODEL["hf/config.json"]
    hub.branches["refs/pr/1"].append({})
    third = push(exported, create_pr=True).run(tmp_path / "third")
    assert third["pull_request"] == first["pull_request"]
    assert len(hub.pulls) == 1
    assert hub.tree("refs/pr/1")["config.json"] == MODEL["hf/config.json"]


def test_the_token_is_in_no_fact_file_or_log(hub, exported, tmp_path, caplog):
    with caplog.at_level(logging.DEBUG):
        facts = push(exported).run(tmp_path / "out")
        hub.answer["/repos/create"] = (500, f"cannot serve {TOKEN}")
        with pytest.raises(StageError) as failure:
            push(exported).run(tmp_path / "failed")
    written = [path.read_text() for path in regular_files(tmp_path / "out")]
    for text in [json.dumps(facts), caplog.text, str(failure.value), *written]:
        assert TOKEN not in text


def test_a_refused_token_is_a_missing_credential(hub, exported, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(CapabilityError, match=r"someone/model.*HTTP 401(.|\n)*HF_TOKEN"):
        push(exported).run(tmp_path / "out")
    assert hub.commits == 0


def test_a_failing_hub_is_a_failed_stage_that_names_the_status(hub, exported, tmp_path):
    hub.answer["/commit/main"] = (500, "out of order")
    with pytest.raises(StageError, match=r"HTTP 500(.|\n)*Push again"):
        push(exported).run(tmp_path / "out")
    hub.answer.clear()
    facts = push(exported).run(tmp_path / "out")
    assert facts["sent"] == sorted(hub.tree())


def test_a_file_that_the_hub_ignores_is_noticed(hub, exported, tmp_path):
    hub.ignored.append("chat_template.jinja")
    with pytest.raises(StageError, match=r"1 of 3 files are not in commit.*chat_template.jinja"):
        push(exported).run(tmp_path / "out")


def test_without_a_token_nothing_is_asked(hub, exported, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "absent"))
    with pytest.raises(CapabilityError, match="hf auth login"):
        push(exported).run(tmp_path / "out")
    assert hub.requests == []


@pytest.mark.usefixtures("hub")
def test_offline_is_said(exported, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CapabilityError, match="HF_HUB_OFFLINE"):
        push(exported).run(tmp_path / "out")


def test_a_dry_run_lists_all_asks_nobody_and_is_another_identity(
    hub, exported, tmp_path, monkeypatch
):
    monkeypatch.delenv("HF_TOKEN")
    dry = push(exported, dry_run=True)
    facts = dry.run(tmp_path / "out")
    assert [file["path"] for file in facts["files"]] == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
    ]
    assert facts["bytes"] == sum(len(content) for content in MODEL.values())
    assert hub.requests == []
    assert stage_key(dry) != stage_key(push(exported))


@pytest.mark.parametrize("listed", ["hf/../../secret.txt", "/etc/hostname", "hf/link"])
def test_no_path_leaves_the_export(hub, tmp_path, listed):
    (tmp_path / "secret.txt").write_text("secret")
    exported = sealed_export(tmp_path / "export", MODEL)
    (exported.path / "hf/link").symlink_to(tmp_path / "secret.txt")
    manifest = exported.manifest
    manifest["files"].append({"path": listed, "bytes": 6, "sha256": "0" * 64})
    manifest["facts"]["folders"] = {"hf": "/etc" if listed.startswith("/") else "hf"}
    write_record(exported.path / "manifest.json", manifest)
    with pytest.raises(ArtifactError, match=r"outside|no file inside its folder"):
        push(exported).run(tmp_path / "out")
    assert hub.requests == []


def test_an_export_that_changed_is_not_sent(hub, exported, tmp_path):
    weights = exported.path / "hf/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(ArtifactError, match="has changed since it was exported"):
        push(exported).run(tmp_path / "out")
    assert hub.requests == []


def test_looking_at_a_repository_that_was_deleted_makes_none_and_a_push_does(
    hub, exported, tmp_path
):
    step = push(exported)
    step.run(tmp_path / "first")
    assert step.outside_changes() == []
    hub.branches.clear()
    hub.created.clear()
    changes = step.outside_changes()
    assert [line.partition(" ")[0] for line in changes] == sorted(
        name.removeprefix("hf/") for name in MODEL
    )
    assert not hub.created
    step.run(tmp_path / "second")
    assert len(hub.created) == 1
    assert set(hub.tree()) == {name.removeprefix("hf/") for name in MODEL}
