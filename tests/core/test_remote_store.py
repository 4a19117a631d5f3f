"""Results that are kept behind a URL: built once, whole or absent, resumed elsewhere."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from penstock.core.cache.manifest import MANIFEST
from penstock.core.cache.record import with_digest
from penstock.core.cache.stage import ATTEMPT, Facts, Input, Stage, stage_key
from penstock.core.cache.store import PlannedStage, fetch_cached, find_cached, get_or_build
from penstock.core.errors import ArtifactError, ConfigError, Interrupted, StageError
from penstock.core.files import atomic_write
from penstock.core.remote.artifact_sync import BackgroundUploader, RemoteArtifact
from penstock.core.remote.path import RemotePath
from penstock.engine.checkpoint.folders import CheckpointNaming
from penstock.train.launch.upload_selection import files_to_download, files_to_upload
from tests.core.toy import ALPHABET, FOUR, Letters, LettersSettings, Slowly
from tests.corruption import flip
from tests.turns import one_day_in

SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Bulk(Letters):
    """Files that take a moment to send."""

    name: ClassVar[str] = "bulk"

    def run(self, out: Path) -> Facts:
        for number in range(24):
            with atomic_write(out / f"{number:02}.bin") as part:
                part.write_bytes(bytes([number]) * (4 << 20))
        return {}


@dataclass(frozen=True)
class Varying(Letters):
    """Its key does not say what it writes."""

    text: str = ""

    def run(self, out: Path) -> Facts:
        (out / "a.txt").write_text(self.text)
        return {}


@dataclass(frozen=True)
class Steps(Stage):
    """A run with a checkpoint at each of five steps, which a person may stop."""

    name: ClassVar[str] = "steps"
    version: ClassVar[int] = 1

    settings: LettersSettings = FOUR
    stop_after: int | None = None
    journal: Path | None = None

    @property
    def inputs(self) -> Mapping[str, Input]:
        return {"read": ALPHABET}

    def run(self, out: Path) -> Facts:
        done = [int(p.parent.name.split("_")[-1]) for p in out.glob("checkpoints/*/COMPLETE")]
        for step in range(max(done, default=0) + 1, 6):
            folder = out / "checkpoints" / f"global_step_{step}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "state.json").write_text(json.dumps({"step": step}))
            (folder / "COMPLETE").touch()
            with (out / "metrics.jsonl").open("a") as stream:
                stream.write(f"{step}\n")
            if self.journal:
                with self.journal.open("a") as stream:
                    stream.write(str(step))
            if step == self.stop_after:
                raise Interrupted("stopped")
        return {"steps": 5}

    def files_to_upload(self, out: Path) -> list[list[Path]]:
        return files_to_upload(out)

    def files_to_download(self, names, out: Path) -> list[str]:
        return files_to_download(names, out, CheckpointNaming())


@pytest.fixture
def machine(bucket, tmp_path, monkeypatch):
    """`machine(stage, name)` is the step of the stage on the machine called so."""

    def on(stage: Stage, name: str) -> PlannedStage:
        monkeypatch.setenv("PENSTOCK_CACHE_HOME", str(tmp_path / name))
        return PlannedStage(
            stage, tmp_path / name / "mirror" / stage.name, f"{bucket}/{stage.name}"
        )

    return on


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def names_at(step: PlannedStage) -> set[str]:
    assert step.remote
    return set(RemotePath.from_url(step.remote).files())


def build(stage: Stage, folder: Path, url: str, home: Path, said=None) -> None:
    """In another process, as another machine."""
    os.environ["PENSTOCK_CACHE_HOME"] = str(home)
    lines: list[str] = []
    outcome = get_or_build(PlannedStage(stage, folder, url), notify=lines.append)
    if said:
        said.put((outcome.status, lines))


def test_what_one_machine_built_the_others_fetch(machine, tmp_path):
    stage = Letters(journal=tmp_path / "journal")
    here, there = machine(stage, "here"), None
    outcome = get_or_build(here)
    assert (outcome.status, outcome.where) == ("ran", here.remote)
    assert names_at(here) == {"a.txt", "b.txt", "c.txt", "d.txt", MANIFEST}
    assert get_or_build(here).status == "cached"
    there = machine(stage, "there")
    assert find_cached(there) == json.loads((here.path / MANIFEST).read_bytes())
    assert not there.path.exists()
    assert get_or_build(there).status == "cached"
    assert content(there.path) == content(here.path)
    assert (tmp_path / "journal").read_text() == "abcd"
    third = machine(stage, "third")
    assert fetch_cached(third)
    assert content(third.path) == content(here.path)


@one_day_in(2, of=1)
def test_two_machines_at_once_do_the_work_once(machine, tmp_path):
    stage = Letters(journal=tmp_path / "journal", before=Slowly(1.5))
    steps = [machine(stage, name) for name in ("one", "two")]
    said = SPAWN.Queue()
    processes = [
        SPAWN.Process(
            target=build, args=(stage, step.path, step.remote, step.path.parents[1], said)
        )
        for step in steps
    ]
    for process in processes:
        process.start()
    told = sorted(said.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert [status for status, _ in told] == ["cached", "ran"]
    assert "is being built on" in told[0][1][0]
    assert (tmp_path / "journal").read_text() == "abcd"
    assert content(steps[0].path) == content(steps[1].path)
    assert names_at(steps[0]) == {"a.txt", "b.txt", "c.txt", "d.txt", MANIFEST}


@one_day_in(2, of=1)
def test_killed_while_sending_it_leaves_no_manifest_and_a_rerun_sends_only_the_rest(machine):
    stage = Bulk(before=Slowly(0))
    step = machine(stage, "here")
    assert step.remote
    process = SPAWN.Process(
        target=build, args=(step.stage, step.path, step.remote, step.path.parents[1])
    )
    process.start()
    place = RemotePath.from_url(step.remote)
    while len([name for name in place.files() if name.endswith(".bin")]) < 9:
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    notes = step.path.with_name(".bulk.sent.json")
    noted = json.loads(notes.read_text()) if notes.exists() else {}
    before = {name: info["LastModified"] for name, info in place.files().items()}
    assert MANIFEST not in before
    time.sleep(1.1)  # S3 counts seconds
    assert find_cached(step) is None
    began = time.monotonic()
    assert get_or_build(step).status == "cached"
    assert time.monotonic() - began < 30, "its own lease need not run out"
    assert names_at(step) == {*(f"{n:02}.bin" for n in range(24)), MANIFEST}
    after = {name: info["LastModified"] for name, info in place.files().items()}
    assert {name: after[name] for name in noted} == {name: before[name] for name in noted}
    other = machine(stage, "there")
    get_or_build(other)
    assert content(other.path) == content(step.path)


@pytest.mark.slow
def test_what_was_sent_is_not_sent_again(machine):
    step = machine(Letters(), "here")
    get_or_build(step)
    place = RemotePath.from_url(step.remote or "")
    (place / MANIFEST).delete()
    before = {name: info["LastModified"] for name, info in place.files().items()}
    time.sleep(1.1)  # S3 counts seconds
    assert get_or_build(step).status == "cached"
    after = {name: info["LastModified"] for name, info in place.files().items()}
    assert after.pop(MANIFEST)
    assert after == before


def test_a_file_that_is_written_while_it_is_sent_is_sent_again(machine, monkeypatch):
    step = machine(Letters(), "here")
    get_or_build(step)
    assert step.remote
    artifact = RemoteArtifact(step.remote, step.path)
    put = RemotePath.put

    def written_meanwhile(self, path):
        info = put(self, path)
        path.write_bytes(b"changed")
        monkeypatch.undo()
        return info

    (step.path / "a.txt").write_bytes(b"new")
    monkeypatch.setattr(RemotePath, "put", written_meanwhile)
    assert artifact.send(["a.txt"]) == 1
    assert artifact.send(["a.txt"]) == 1
    assert (artifact.root / "a.txt").read() == b"changed"


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["[]", "7", '{"a.txt": 7}', '{"a.txt": {"bytes": 1}}', "{"])
def test_where_notes_of_what_was_sent_are_damaged_it_is_sent_again(machine, damage):
    step = machine(Letters(), "here")
    get_or_build(step)
    place = RemotePath.from_url(step.remote or "")
    (place / MANIFEST).delete()
    (place / "a.txt").write(b"?")
    step.path.with_name(f".{step.path.name}.sent.json").write_text(damage)
    assert get_or_build(step).status == "cached"
    assert (place / "a.txt").read() == b"a"
    assert (place / MANIFEST).read() == (step.path / MANIFEST).read_bytes()


def test_a_damaged_or_dangerous_result_is_not_taken(machine):
    step = machine(Letters(), "here")
    get_or_build(step)
    place = RemotePath.from_url(step.remote or "")
    (place / "b.txt").write(b"x")
    with pytest.raises(ArtifactError, match=r"b\.txt differs from its manifest"):
        get_or_build(machine(Letters(), "there"))
    (place / "b.txt").delete()
    with pytest.raises(ArtifactError, match=r"has a manifest, but b\.txt is missing"):
        get_or_build(machine(Letters(), "there"))
    manifest = json.loads((place / MANIFEST).read() or b"")
    manifest["files"][0]["path"] = "../../escaped.txt"
    (place / MANIFEST).write(json.dumps(with_digest(manifest)).encode())
    with pytest.raises(ArtifactError, match="is no file inside its folder"):
        get_or_build(machine(Letters(), "there"))


def test_a_mirror_that_lost_files_gets_them_back(machine):
    step = machine(Letters(), "here")
    get_or_build(step)
    (step.path / "c.txt").unlink()
    assert get_or_build(step).status == "cached"
    assert (step.path / "c.txt").read_text() == "c"


def test_a_mirror_that_was_damaged_is_fetched_again_and_that_is_told(machine):
    step, said = machine(Letters(), "here"), []
    get_or_build(step)
    flip(step.path / "c.txt", random.Random(0))
    assert get_or_build(step, notify=said.append).status == "cached"
    assert (step.path / "c.txt").read_text() == "c"
    assert len(said) == 1
    assert "is damaged; it is a copy of s3://" in said[0]


def test_refreshing_replaces_what_is_there(machine, tmp_path):
    stage = Letters(journal=tmp_path / "journal")
    get_or_build(machine(stage, "here"))
    assert get_or_build(machine(stage, "there"), cache="refresh").status == "ran"
    assert (tmp_path / "journal").read_text() == "abcdabcd"
    there = machine(stage, "there")
    assert find_cached(there) == json.loads((there.path / MANIFEST).read_bytes())
    assert get_or_build(machine(stage, "here")).status == "cached"


def test_a_mirror_of_another_result_with_the_same_key_is_fetched_again(machine):
    get_or_build(machine(Varying(text="old"), "there"))
    get_or_build(machine(Varying(text="new"), "here"), cache="refresh")
    there = machine(Varying(text="old"), "there")
    assert get_or_build(there).status == "cached"
    assert (there.path / "a.txt").read_text() == "new"


def test_a_machine_that_lost_its_lease_writes_no_manifest(machine):
    step = machine(Letters(), "here")
    get_or_build(step)
    manifest = json.loads((step.path / MANIFEST).read_bytes())
    depot = RemoteArtifact(step.remote or "", step.path)
    lease = depot.lease()
    assert lease.acquire(lambda: False, print)
    (depot.root / ".leases" / "00000099").write(b"{}")
    with pytest.raises(StageError, match="taken over by another machine"):
        depot.publish(manifest, lease)
    assert depot.manifest() is None


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_from_its_newest_checkpoint_on_another_machine(
    machine, tmp_path
):
    journal = tmp_path / "journal"
    with pytest.raises(Interrupted):
        get_or_build(machine(Steps(stop_after=3, journal=journal), "here"))
    step = machine(Steps(journal=journal), "there")
    assert ATTEMPT in names_at(step)
    assert MANIFEST not in names_at(step)
    outcome = get_or_build(step)
    assert outcome.facts == {"steps": 5}
    assert journal.read_text() == "12345"
    assert (step.path / "metrics.jsonl").read_text() == "1\n2\n3\n4\n5\n"
    sent = names_at(step)
    assert {f"checkpoints/global_step_{n}/COMPLETE" for n in range(1, 6)} <= sent
    assert {MANIFEST, "metrics.jsonl"} <= sent
    assert ATTEMPT not in sent


def test_a_checkpoint_that_a_run_has_deleted_is_dropped_there_too(machine):
    step = machine(Steps(stop_after=2), "here")
    with pytest.raises(Interrupted):
        get_or_build(step)
    follower = BackgroundUploader(RemoteArtifact(step.remote, step.path), step.stage, print)
    follower.send("meanwhile")
    shutil.rmtree(step.path / "checkpoints" / "global_step_1")
    follower.send("meanwhile")
    kept = {name for name in names_at(step) if name.startswith("checkpoints")}
    assert kept == {f"checkpoints/global_step_2/{name}" for name in ("state.json", "COMPLETE")}


@pytest.mark.slow
def test_a_checkpoint_whose_mark_is_not_there_is_not_gone_on_from(machine):
    with pytest.raises(Interrupted):
        get_or_build(machine(Steps(stop_after=3), "here"))
    step = machine(Steps(), "there")
    (RemotePath.from_url(step.remote or "") / "checkpoints/global_step_3/COMPLETE").delete()
    journal = step.path.parents[1] / "journal"
    get_or_build(machine(Steps(journal=journal), "there"))
    assert journal.read_text() == "345"


@pytest.mark.slow
def test_another_runs_folder_is_known_on_every_machine_and_can_be_moved_aside(machine, bucket):
    with pytest.raises(Interrupted):
        get_or_build(machine(Steps(stop_after=2), "here"))
    other = Steps(settings=LettersSettings(letters="z"))

    def claim(step: PlannedStage) -> None:
        held = json.loads((step.path / ATTEMPT).read_text())["key"]
        if held != stage_key(step.stage):
            raise ConfigError("held by another")

    with pytest.raises(ConfigError, match="held by another"):
        get_or_build(machine(other, "there"), claim=claim)

    def fresh(step: PlannedStage) -> None:
        step.path.rename(step.path.with_name("aside"))

    step = machine(other, "there")
    assert get_or_build(step, claim=fresh).status == "ran"
    aside = RemotePath.from_url(f"{bucket}/steps.old-1").files()
    assert "checkpoints/global_step_2/COMPLETE" in aside
    assert ATTEMPT in aside
    assert json.loads(RemotePath.from_url(f"{bucket}/steps/{MANIFEST}").read() or b"")[
        "key"
    ] == stage_key(other)
