"""Pushing to file systems with a URL."""

import json
import os
import time
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from pydantic import ValidationError

from penstock.core.cache.store import PlannedStage, get_or_build
from penstock.core.errors import CapabilityError
from penstock.push.copy import INDEX, CopyTarget
from penstock.push.stage import Push, PushSettings
from tests.stages.exports import sealed_export

MODEL = {
    "hf/config.json": b'{"model_type": "llama"}\n',
    "hf/model.safetensors": bytes(range(256)) * 300,
    "hf/sub/chat.jinja": b"{{ x }}",
}


@pytest.fixture
def exported(tmp_path):
    return sealed_export(tmp_path / "export", MODEL)


def push(exported, url) -> Push:
    return Push(settings=PushSettings(url=url), exported=exported)


def files_at(url: str) -> dict[str, bytes]:
    system, root = fsspec.core.url_to_fs(url)
    found = system.find(root)
    return {path.removeprefix(root.rstrip("/") + "/"): system.cat_file(path) for path in found}


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path):
    if request.param == "file":
        return f"file://{tmp_path}/target"
    return f"memory://{tmp_path.name}/target"


def test_the_target_holds_the_exported_bytes_and_a_second_push_writes_nothing(
    exported, url, tmp_path, monkeypatch
):
    first = push(exported, url).run(tmp_path / "first")
    there = files_at(url)
    index = json.loads(there.pop(INDEX))
    assert there == {name.removeprefix("hf/"): content for name, content in MODEL.items()}
    assert index["files"] == first["files"]

    system, _ = fsspec.core.url_to_fs(url)
    opened = system.open

    def read_only(path, mode="rb", **options):
        assert mode == "rb", f"{path} was opened with {mode}"
        return opened(path, mode, **options)

    monkeypatch.setattr(system, "open", read_only)
    second = push(exported, url).run(tmp_path / "second")
    assert second["sent"] == []
    assert second["unchanged"] == first["sent"]


def test_files_of_a_folder_reach_the_disk_before_they_bear_their_names(
    exported, tmp_path, monkeypatch
):
    steps = []
    synced, moved = os.fsync, LocalFileSystem.mv

    def fsync(descriptor):
        steps.append(("fsync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        synced(descriptor)

    def mv(system, aside, final):
        steps.append(("mv", Path(aside).name))
        moved(system, aside, final)

    out = tmp_path / "first"
    out.mkdir()
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(LocalFileSystem, "mv", mv)
    push(exported, f"file://{tmp_path}/target").run(out)
    begin = next(at for at, (kind, _) in enumerate(steps) if kind == "mv") - 1
    for at in range(begin, len(steps), 3):
        (_, aside), (_, renamed), (_, folder) = steps[at : at + 3]
        assert [kind for kind, _ in steps[at : at + 3]] == ["fsync", "mv", "fsync"]
        assert aside == renamed
        assert folder in ("target", "sub")


@pytest.mark.parametrize("left", [None, MODEL["hf/model.safetensors"][:-1]], ids=["gone", "cut"])
def test_a_file_that_is_not_whole_at_the_target_any_more_is_sent_again(
    exported, url, tmp_path, left
):
    push(exported, url).run(tmp_path / "first")
    system, root = fsspec.core.url_to_fs(url)
    if left is None:
        system.rm_file(f"{root}/model.safetensors")
    else:
        system.pipe_file(f"{root}/model.safetensors", left)
    facts = push(exported, url).run(tmp_path / "second")
    assert facts["sent"] == ["model.safetensors"]
    there = files_at(url)
    del there[INDEX]
    assert there == {name.removeprefix("hf/"): content for name, content in MODEL.items()}


def test_a_finished_push_looks_at_its_target_and_mends_it(exported, tmp_path):
    url = f"file://{tmp_path}/target"
    step = PlannedStage.in_root(push(exported, url), str(tmp_path / "artifacts"))
    assert [get_or_build(step).status for _ in range(2)] == ["ran", "cached"]
    weights = tmp_path / "target" / "model.safetensors"
    whole = weights.read_bytes()
    lines = []
    for damaged in (b"", bytes([whole[0] ^ 1]) + whole[1:]):
        time.sleep(0.02)  # a tick of the clock that changes are stamped with
        weights.write_bytes(damaged)
        again = get_or_build(step, notify=lines.append)
        assert (again.status, again.facts["sent"]) == ("ran", ["model.safetensors"])
        assert weights.read_bytes() == whole
    assert all("model.safetensors is not at the target as it was sent" in line for line in lines)
    assert get_or_build(step).status == "cached"


def test_superseded_weights_go_and_other_files_stay(exported, url, tmp_path):
    push(exported, url).run(tmp_path / "first")
    system, root = fsspec.core.url_to_fs(url)
    system.pipe_file(f"{root}/README.md", b"mine")
    system.makedirs(f"{root}/other", exist_ok=True)
    system.pipe_file(f"{root}/other/model.safetensors", b"another model")
    sharded = sealed_export(
        tmp_path / "sharded",
        {"hf/model-00001-of-00001.safetensors": b"x", "hf/model.safetensors.index.json": b"{}"},
    )
    facts = push(sharded, url).run(tmp_path / "second")
    assert facts["removed"] == ["model.safetensors"]
    there = files_at(url)
    assert "model.safetensors" not in there
    assert there["README.md"] == b"mine"
    assert there["other/model.safetensors"] == b"another model"
    listed = {entry["path"] for entry in json.loads(there[INDEX])["files"]}
    assert "model.safetensors" not in listed


@pytest.mark.parametrize("cut_in", ["config.json", "model.safetensors"])
def test_a_push_cut_off_is_taken_up_and_its_index_never_vouches_for_half_a_file(
    tmp_path, monkeypatch, cut_in
):
    url = f"file://{tmp_path}/target"
    older = sealed_export(tmp_path / "older", {**MODEL, "hf/config.json": b"{}" + b" " * 22})
    push(older, url).run(tmp_path / "zero")

    newer = sealed_export(
        tmp_path / "newer",
        {**MODEL, "hf/model.safetensors": b"n" * len(MODEL["hf/model.safetensors"])},
    )
    whole_put = CopyTarget._upload

    def dies_in_the_weights(self, file):
        whole_put(self, file)
        if file.name == cut_in:
            raise KeyboardInterrupt

    monkeypatch.setattr(CopyTarget, "_upload", dies_in_the_weights)
    with pytest.raises(KeyboardInterrupt):
        push(newer, url).run(tmp_path / "out")
    monkeypatch.undo()

    # The older export has the same sizes: only the index can tell that its weights are gone.
    assert CopyTarget.open(url).difference(contents(older))[0] == [
        "config.json",
        "model.safetensors",
    ]
    facts = push(newer, url).run(tmp_path / "out")
    assert facts["sent"] == ["config.json", "model.safetensors"]
    there = files_at(url)
    assert there["model.safetensors"] == b"n" * len(MODEL["hf/model.safetensors"])
    assert there["config.json"] == MODEL["hf/config.json"]


def contents(exported):
    from penstock.push.contents import list_contents

    return list_contents(exported)


def test_a_scheme_nobody_can_write_is_a_missing_capability(exported, tmp_path):
    with pytest.raises(CapabilityError, match=r"nowhere://x.*nowhere(.|\n)*another URL"):
        push(exported, "nowhere://x/y").run(tmp_path / "out")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "one of push.repo_id and push.url"),
        ({"repo_id": "a/b", "url": "file:///x"}, "one of push.repo_id and push.url"),
        ({"repo_id": "a/b/c"}, "owner/name"),
        ({"url": "s3://key:planted@bucket/x"}, "credentials"),
        ({"url": "abfs://c@a/x?sig=planted"}, "credentials"),
        ({"url": "file:///x", "create_pr": True}, "push.create_pr"),
        ({"repo_id": "a/b", "revision": "v1", "create_pr": True}, "pull request on main"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_without_repeating_secrets(settings, said):
    with pytest.raises(ValidationError, match=said) as fault:
        PushSettings(**settings)
    assert "planted" not in str(fault.value)
