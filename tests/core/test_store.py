import contextlib
import errno
import hashlib
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from penstock.core.cache import store
from penstock.core.cache.manifest import MANIFEST
from penstock.core.cache.stage import ATTEMPT, ERROR_LOG, Artifact, Source, identity, stage_key
from penstock.core.cache.store import PlannedStage, find_local, get_or_build, lock_path
from penstock.core.errors import (
    ArtifactError,
    CapabilityError,
    ConfigError,
    Interrupted,
    StageError,
)
from tests.core.toy import Dying, Letters, LettersSettings, Slowly, UntilThere, step_of

SPAWN = multiprocessing.get_context("spawn")
TIMES = {"created", "seconds", "host", "code", "digest"}


class BrokenError(Exception):
    pass


def failing_at(letter, error):
    def before(current, _out):
        if current == letter:
            raise error

    return before


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def lasting(folder: Path) -> dict[str, object]:
    """The folder's files, and its manifest without what may differ between two runs."""
    found = content(folder)
    manifest = json.loads(found.pop(MANIFEST))
    return {**found, MANIFEST: {k: v for k, v in manifest.items() if k not in TIMES}}


def build(root, stage, said):
    """In another process: realize, and put down how it went."""
    lines = []

    def notify(line):
        lines.append(line)
        (root / "waits").touch()

    outcome = get_or_build(step_of(stage, root), notify=notify)
    said.put((outcome.status, lines))


def test_a_result_is_invisible_until_its_manifest_seals_it(tmp_path):
    seen = []
    step = step_of(Letters(before=lambda *_: seen.append(find_local(step))), tmp_path)
    outcome = get_or_build(step)
    assert seen == [None] * 4
    assert outcome.status == "ran"
    manifest = find_local(step)
    assert manifest is not None
    assert manifest["facts"] == {"letters": 4} == outcome.facts
    assert {file["path"]: (file["bytes"], file["sha256"]) for file in manifest["files"]} == {
        f"{letter}.txt": (1, hashlib.sha256(letter.encode()).hexdigest()) for letter in "abcd"
    }
    assert set(content(step.path)) == {"a.txt", "b.txt", "c.txt", "d.txt", MANIFEST}


def test_a_second_run_reuses_and_does_nothing(tmp_path):
    journal = tmp_path / "journal"
    step = step_of(Letters(journal=journal), tmp_path)
    get_or_build(step)
    before = content(step.path)
    assert get_or_build(step).status == "cached"
    assert journal.read_text() == "abcd"
    assert content(step.path) == before


def test_rerun_after_a_failure_resumes_and_leaves_the_same_bytes(tmp_path):
    journal = tmp_path / "journal"
    failed = step_of(
        Letters(journal=journal, before=failing_at("c", BrokenError("no c"))), tmp_path
    )
    with pytest.raises(StageError, match=r"letters failed after 0s: BrokenError: no c\n.*resume"):
        get_or_build(failed)
    assert find_local(failed) is None
    assert "no c" in (failed.path / ERROR_LOG).read_text()
    # What a dead writer leaves half-written is swept away.
    (failed.path / "x.txt.part").write_text("half")
    outcome = get_or_build(step_of(Letters(journal=journal), tmp_path))
    assert outcome.status == "resumed"
    assert journal.read_text() == "abcd"
    undisturbed = get_or_build(step_of(Letters(), tmp_path / "other"))
    assert lasting(outcome.path) == lasting(undisturbed.path)


def test_a_killed_writer_frees_the_lock_and_its_work_is_taken_up(tmp_path):
    journal = tmp_path / "journal"
    stage = Letters(journal=journal, before=Dying("c"))
    said = SPAWN.Queue()
    child = SPAWN.Process(target=build, args=(tmp_path, stage, said))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    step = step_of(Letters(journal=journal), tmp_path)
    assert (step.path / ATTEMPT).is_file()
    waited = []
    assert get_or_build(step, notify=waited.append).status == "resumed"
    assert waited == []
    assert journal.read_text() == "abcd"


@pytest.mark.slow
def test_of_two_at_once_one_works_and_the_other_waits_and_reuses(tmp_path):
    journal = tmp_path / "journal"
    said = SPAWN.Queue()
    stage = Letters(journal=journal, before=UntilThere(tmp_path / "waits"))
    first = SPAWN.Process(target=build, args=(tmp_path, stage, said))
    second = SPAWN.Process(target=build, args=(tmp_path, stage, said))
    first.start()
    while not (tmp_path / "letters" / "begun").exists():
        time.sleep(0.01)
    second.start()
    told = dict([said.get(timeout=30), said.get(timeout=30)])
    first.join()
    second.join()
    assert set(told) == {"ran", "cached"}
    assert told["ran"] == []
    assert "waiting" in told["cached"][0]
    assert journal.read_text() == "abcd"


@pytest.mark.slow
def test_a_run_with_other_settings_in_the_same_folder_is_refused_while_one_works(tmp_path):
    stage = Letters(before=UntilThere(tmp_path / "end"))
    outcomes = SPAWN.Queue()
    first = SPAWN.Process(target=build, args=(tmp_path, stage, outcomes))
    first.start()
    try:
        while first.is_alive() and not (tmp_path / "letters" / "begun").exists():
            time.sleep(0.01)
        other = Letters(settings=LettersSettings(letters="xyz"))
        step = PlannedStage(other, step_of(stage, tmp_path).path)
        with pytest.raises(ConfigError, match=r"written by another run with other settings.*there"):
            get_or_build(step)
    finally:
        (tmp_path / "end").touch()
        first.kill()
        first.join()


def test_refresh_builds_again_and_leaves_nothing_old(tmp_path):
    journal = tmp_path / "journal"
    step = step_of(Letters(journal=journal), tmp_path)
    get_or_build(step)
    assert get_or_build(step, cache="refresh").status == "ran"
    assert journal.read_text() == "abcdabcd"
    assert [p.name for p in step.path.parent.iterdir() if not p.name.startswith(".")] == [
        step.path.name
    ]


@pytest.mark.parametrize("cache", ["refresh", "off"])
def test_a_refresh_that_fails_gives_the_old_result_back(tmp_path, cache):
    step = step_of(Letters(), tmp_path)
    get_or_build(step)
    before = content(step.path)
    broken = PlannedStage(Letters(before=failing_at("b", BrokenError())), step.path)
    with pytest.raises(StageError, match=r"previous result was restored in"):
        get_or_build(broken, cache=cache)
    assert content(step.path) == before
    assert get_or_build(step).status == "cached"


@pytest.mark.parametrize("call", ["remove", "replace_folder"])
def test_a_kill_while_a_failed_refresh_gives_the_old_result_back_does_not_lose_it(tmp_path, call):
    """At the first of these calls after the failure: before what is done, and after it."""
    journal = tmp_path / "journal"
    step = step_of(Letters(journal=journal), tmp_path)
    get_or_build(step)
    before = content(step.path)
    child = os.fork()
    if child == 0:
        has_failed = []

        def fail(letter, _out):
            if letter == "b":
                has_failed.append(letter)
                raise BrokenError

        called = getattr(store, call)

        def killed(*given):
            found = called(*given)
            if has_failed:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        setattr(store, call, killed)
        with contextlib.suppress(BaseException):
            get_or_build(PlannedStage(Letters(before=fail), step.path), cache="refresh")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert get_or_build(step).status == "cached"
    assert content(step.path) == before
    assert journal.read_text() == "abcd"


@pytest.mark.parametrize("stopped", [Interrupted("asked to stop"), KeyboardInterrupt()])
@pytest.mark.parametrize("again", ["refresh", "reuse"])
def test_a_refresh_that_is_interrupted_is_gone_on_from(tmp_path, stopped, again):
    journal = tmp_path / "journal"
    step = step_of(Letters(journal=journal), tmp_path)
    get_or_build(step)
    cut = PlannedStage(Letters(journal=journal, before=failing_at("c", stopped)), step.path)
    with pytest.raises(type(stopped)):
        get_or_build(cut, cache="refresh")
    assert get_or_build(step, cache=again).status == "resumed"
    assert journal.read_text() == "abcd" + "ab" + "cd"
    assert [p.name for p in step.path.parent.iterdir() if not p.name.startswith(".")] == [
        step.path.name
    ]


def test_a_refresh_that_fails_after_it_was_interrupted_gives_the_old_result_back(tmp_path):
    step = step_of(Letters(), tmp_path)
    get_or_build(step)
    before = content(step.path)
    for error in (Interrupted("asked to stop"), BrokenError()):
        with pytest.raises((Interrupted, StageError)):
            get_or_build(
                PlannedStage(Letters(before=failing_at("c", error)), step.path), cache="refresh"
            )
    assert content(step.path) == before


def test_off_does_not_take_an_attempt_up(tmp_path):
    journal = tmp_path / "journal"
    broken = step_of(Letters(journal=journal, before=failing_at("c", BrokenError())), tmp_path)
    with pytest.raises(StageError):
        get_or_build(broken)
    assert get_or_build(step_of(Letters(journal=journal), tmp_path), cache="off").status == "ran"
    assert journal.read_text() == "ababcd"


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("longer")])
def test_a_damaged_result_is_named_and_not_used(tmp_path, damage):
    step = step_of(Letters(), tmp_path)
    get_or_build(step)
    damage(step.path / "b.txt")
    with pytest.raises(ArtifactError, match=r"b\.txt: (missing|6 bytes, 1 in.*)\n.*--force letter"):
        get_or_build(step)
    assert get_or_build(step, cache="refresh").status == "ran"


def test_a_manifest_that_is_no_json_is_named(tmp_path):
    step = step_of(Letters(), tmp_path)
    get_or_build(step)
    (step.path / MANIFEST).write_text("{")
    with pytest.raises(ArtifactError, match=MANIFEST):
        find_local(step)


def test_a_full_disk_is_said_in_words_and_the_work_is_kept(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "c.txt"))
    step = step_of(Letters(before=failing_at("c", full)), tmp_path)
    with pytest.raises(StageError, match=r"the disk is full .*c\.txt.* MB are left") as caught:
        get_or_build(step)
    assert caught.value.exit_code == 1
    assert (step.path / "b.txt").is_file()


def test_a_seal_that_cannot_be_written_leaves_the_work_an_attempt(tmp_path, monkeypatch):
    write = store.write_record

    def full(path, record):
        if path.name == MANIFEST:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, record)

    monkeypatch.setattr(store, "write_record", full)
    step = step_of(Letters(), tmp_path)
    with pytest.raises(StageError, match="the disk is full"):
        get_or_build(step)
    monkeypatch.undo()
    assert (step.path / ATTEMPT).is_file()
    assert get_or_build(step).status == "resumed"


@pytest.mark.parametrize(("error", "code"), [(CapabilityError("x"), 3), (ConfigError("x"), 1)])
def test_a_stages_own_errors_keep_their_meaning_once_work_has_begun(tmp_path, error, code):
    with pytest.raises(StageError) as caught:
        get_or_build(step_of(Letters(before=failing_at("a", error)), tmp_path))
    assert caught.value.exit_code == code


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "letters").write_text("a file is in the way")
    with pytest.raises(StageError, match="cannot be created: file exists"):
        get_or_build(step_of(Letters(), tmp_path))


def test_a_claim_that_refuses_leaves_the_folder_alone(tmp_path):
    step = step_of(Letters(), tmp_path)

    def refuse(_step):
        raise ConfigError("not yours")

    with pytest.raises(ConfigError):
        get_or_build(step, claim=refuse)
    assert not step.path.exists()
    assert lock_path(step.path).parent == step.path.parent


def test_how_and_neutral_fields_do_not_enter_the_key_and_everything_else_does(tmp_path):
    key = stage_key(Letters())
    assert stage_key(Letters(journal=tmp_path, before=Slowly(1))) == key
    assert "doubled" not in identity(Letters())["settings"]
    others = [
        Letters(LettersSettings(doubled=True)),
        Letters(LettersSettings(letters="abc")),
        Letters(read=Source({"kind": "builtin", "name": "other"})),
        Letters(read=Artifact("x", "0" * 64, tmp_path)),
        type("Raised", (Letters,), {"version": 2})(),
        type("Renamed", (Letters,), {"name": "renamed"})(),
    ]
    assert len({key, *map(stage_key, others)}) == 1 + len(others)


def test_an_artifacts_place_is_not_its_identity(tmp_path):
    here, there = Artifact("x", "1" * 64, tmp_path), Artifact("x", "1" * 64, Path("/elsewhere"))
    assert stage_key(Letters(read=here)) == stage_key(Letters(read=there))


def test_the_way_keys_are_made_does_not_change_by_accident():
    """All cached results of all users hang on this number."""
    assert identity(Letters()) == {
        "stage": "letters",
        "version": 1,
        "settings": {"letters": "abcd"},
        "inputs": {"read": "191f18b7cbc00e50a6301d7cf6c8b6f3c65b1182c3013922852bf6610ac8e816"},
    }
    assert stage_key(Letters()) == (
        "5f0cdb33b45f254317f8e95ec38b7c5f061ca659e6e0c2944efac7a969ba1f83"
    )
