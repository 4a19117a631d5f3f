import errno
import multiprocessing
import os
import shutil
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from filelock import FileLock

from penstock.cli.artifacts import entries
from penstock.cli.artifacts.commands import find_entries
from penstock.cli.artifacts.entries import LocalEntry
from penstock.cli.artifacts.prune import DAY, choose_prunable, prune
from penstock.cli.console import Console
from penstock.config.schema.run import RunConfig
from penstock.core.cache import in_use
from penstock.core.cache.in_use import (
    GATE_LOCK,
    PINS_FOLDER,
    block_new_pins,
    pin_artifacts,
    pinned_keys,
)
from penstock.core.cache.manifest import MANIFEST
from penstock.core.cache.record import write_record
from penstock.core.cache.stage import Artifact, stage_key
from penstock.core.cache.store import PlannedStage, get_or_build
from penstock.core.errors import ArtifactError, StageError
from penstock.core.files import read_json, write_json
from penstock.core.replace_folder import DELETED
from penstock.export.links import find_links, link_exported
from tests.cli.command import penstock
from tests.core.toy import Export, LettersSettings, Pack, Prepare, Train, step_of
from tests.stages.prepared import prepare, texts, write_lines


def chain(root, letters):
    """prepare -> pack -> train, sealed; the steps."""
    prepare = step_of(Prepare(LettersSettings(letters=letters)), root)
    pack = step_of(Pack(read=prepare.artifact), root)
    train = step_of(Train(read=pack.artifact), root)
    for step in (prepare, pack, train):
        get_or_build(step)
    return prepare, pack, train


def age(step, days):
    record = read_json(step.path / MANIFEST)
    created = datetime.now(UTC) - timedelta(days=days)
    write_record(step.path / MANIFEST, {**record, "created": created.isoformat(timespec="seconds")})


def test_list_shows_every_result_with_its_standing(tmp_path):
    prepare, pack, train = chain(tmp_path, "ab")

    def stop(_letter, _out):
        raise KeyboardInterrupt

    unfinished = step_of(Prepare(LettersSettings(letters="xyz"), before=stop), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        get_or_build(unfinished)
    said = penstock("artifacts", "list", "--root", tmp_path, "--json")
    found = {each["path"]: (each["stage"], each["standing"]) for each in said.last["artifacts"]}
    assert found == {
        str(prepare.path): ("prepare", "cached"),
        str(pack.path): ("pack", "cached"),
        str(train.path): ("train", "cached"),
        str(unfinished.path): ("prepare", "partial"),
    }
    table = penstock("artifacts", "list", "--root", tmp_path).out
    assert all(path in table for path in found)


def test_show_finds_a_result_by_the_first_digits_of_its_key(tmp_path):
    prepare, _, _ = chain(tmp_path, "ab")
    key = prepare.artifact.key
    said = penstock("artifacts", "show", key[:9], "--root", tmp_path, "--json")
    assert said.last["manifest"] == read_json(prepare.path / MANIFEST)
    assert "letters: ab" in penstock("artifacts", "show", prepare.path).out
    assert penstock("artifacts", "show", "zz", "--root", tmp_path).code == 2
    several = penstock("artifacts", "show", "", "--root", tmp_path)
    assert several.code == 2
    assert "3 keys start with" in several.err


def test_verify_names_a_flipped_byte_a_missing_file_and_a_wrong_length(tmp_path):
    prepare, pack, train = chain(tmp_path, "ab")
    assert penstock("artifacts", "verify", "--root", tmp_path).code == 0
    flipped = prepare.path / "b.txt"
    stat = flipped.stat()
    flipped.write_text("c")
    os.utime(flipped, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (pack.path / "a.txt").unlink()
    (train.path / "a.txt").write_text("aa")
    said = penstock("artifacts", "verify", "--root", tmp_path)
    assert said.code == 1
    assert f"{flipped}: content differs" in said.err
    assert f"{pack.path / 'a.txt'}: missing" in said.err
    assert f"{train.path / 'a.txt'}: 2 bytes, 1 in the manifest" in said.err
    assert str(prepare.path / "a.txt") not in said.err
    assert penstock("artifacts", "verify", train.artifact.key[:9], "--root", tmp_path).code == 1


def test_prune_never_deletes_what_another_result_was_made_from(tmp_path):
    used = chain(tmp_path, "ab")
    for step in used:
        age(step, 30)
    old = step_of(Prepare(LettersSettings(letters="old")), tmp_path)
    new = step_of(Prepare(LettersSettings(letters="new")), tmp_path)
    for step in (old, new):
        get_or_build(step)
    age(old, 20)

    dry = penstock("artifacts", "prune", "--root", tmp_path, "--dry-run", "--json")
    assert dry.last["pruned"] == [str(old.path)]
    assert old.path.is_dir()
    said = penstock("artifacts", "prune", "--root", tmp_path, "--json")
    assert said.last["pruned"] == [str(old.path)]
    assert not old.path.exists()
    assert all(step.path.is_dir() for step in (*used, new))
    again = penstock("artifacts", "prune", "--root", tmp_path, "--json")
    assert again.last["pruned"] == []


def test_prune_keeps_training_runs_attempts_and_what_is_young(tmp_path):
    _, _, train = chain(tmp_path, "ab")
    trained_alone = step_of(Train(LettersSettings(letters="q")), tmp_path)
    get_or_build(trained_alone)
    for step in (train, trained_alone):
        age(step, 99)

    def fail(_letter, _out):
        raise ValueError

    with pytest.raises(StageError):
        get_or_build(step_of(Prepare(LettersSettings(letters="xyz"), before=fail), tmp_path))
    young = step_of(Prepare(LettersSettings(letters="young")), tmp_path)
    get_or_build(young)
    age(young, 2)
    entries = list(find_entries([str(tmp_path)]))
    assert choose_prunable(entries, keep_last=0, older_than=7 * DAY) == []
    doomed = choose_prunable(entries, keep_last=0, older_than=DAY)
    assert [entry.where for entry in doomed] == [str(young.path)]


def test_a_result_whose_reader_is_only_an_attempt_is_not_pruned(tmp_path):
    """Else the attempt could not be taken up again."""
    prepare = step_of(Prepare(LettersSettings(letters="ab")), tmp_path)
    get_or_build(prepare)

    def fail(_letter, _out):
        raise ValueError

    reader = Pack(read=Artifact("prepare", prepare.artifact.key, prepare.path), before=fail)
    with pytest.raises(StageError):
        get_or_build(step_of(reader, tmp_path))
    assert choose_prunable(list(find_entries([str(tmp_path)])), 0, 0) == []


def test_prune_deletes_cached_slices_that_only_pruned_results_used(tmp_path):
    steps = []
    for name in ("old", "new"):
        data = write_lines(tmp_path / f"{name}.jsonl", texts(3, name))
        stage = prepare((data, {"type": "text"}))
        steps.append(PlannedStage(stage, tmp_path / "root" / "prepare" / stage_key(stage)[:16]))
        get_or_build(steps[-1])
    age(steps[0], 2)
    cache = tmp_path / "root" / "slices"
    assert len(list(cache.glob("*.arrow"))) == 2
    prune = ("artifacts", "prune", "--root", tmp_path, "--json")
    assert penstock(*prune, "--dry-run").last["slices"] == 0  # they are of today
    for file in cache.iterdir():
        os.utime(file, (1, 1))
    told = penstock(*prune, "--dry-run").last
    assert (told["pruned"], told["slices"]) == ([str(steps[0].path)], 1)
    did = penstock(*prune).last
    assert {key: did[key] for key in ("pruned", "slices", "bytes")} == {
        key: told[key] for key in ("pruned", "slices", "bytes")
    }
    [left] = cache.glob("*.arrow")
    [used] = steps[1].path.rglob("*.arrow")
    assert left.samefile(used)
    assert not steps[0].path.exists()


def test_prune_deletes_features_of_images_that_no_result_has(tmp_path):
    _, pack, _ = chain(tmp_path, "ab")
    folder = tmp_path / "features" / "0123456789abcdef"
    (pack.path / "media").mkdir()
    folder.mkdir(parents=True)
    for name in ("linked", "copied", "unused", "young"):
        for end in ("arrow", "json"):
            (folder / f"{name}.{end}").write_text(name)
            os.utime(folder / f"{name}.{end}", None if name == "young" else (1, 1))
    (pack.path / "media" / "linked.arrow").hardlink_to(folder / "linked.arrow")
    (pack.path / "media" / "copied.arrow").write_text("copied")
    prune = ("artifacts", "prune", "--root", tmp_path, "--keep-last", "9", "--json")
    told = [penstock(*prune, *dry).last for dry in (["--dry-run"], [])]
    assert [(each["pruned"], each["features"]) for each in told] == [([], 1)] * 2
    assert {path.stem for path in folder.glob("*.*n")} == {"linked", "copied", "young"}
    assert penstock(*prune).last["features"] == 0


def test_prune_takes_whole_chains_that_lead_to_nothing_that_is_kept(tmp_path):
    used = chain(tmp_path, "ab")
    prepare = step_of(Prepare(LettersSettings(letters="old")), tmp_path)
    pack = step_of(Pack(read=prepare.artifact), tmp_path)
    newest = step_of(Pack(read=used[0].artifact, settings=LettersSettings(letters="n")), tmp_path)
    for step in (prepare, pack, newest):
        get_or_build(step)
    for step in used:
        age(step, 3)
    for step in (prepare, pack):
        age(step, 5)
    prune = ("artifacts", "prune", "--root", tmp_path, "--keep-last", "1", "--json")
    young = penstock(*prune, "--unreferenced", "--older-than", "6d", "--dry-run")
    assert young.last["pruned"] == []
    leaves = penstock(*prune, "--older-than", "36h", "--dry-run")
    assert leaves.last["pruned"] == [str(pack.path)]
    chains = penstock(*prune, "--unreferenced", "--older-than", "36h")
    assert set(chains.last["pruned"]) == {str(pack.path), str(prepare.path)}
    assert all(step.path.is_dir() for step in (*used, newest))
    assert penstock(*prune, "--older-than", "soon").code == 2


def test_prune_leaves_what_a_running_process_works_with_until_it_has_died(tmp_path):
    step, other = (step_of(Prepare(LettersSettings(letters=each)), tmp_path) for each in "xy")
    for each in (step, other):
        get_or_build(each)
    prune = ("artifacts", "prune", "--root", tmp_path, "--keep-last", "0", "--json")
    holder = multiprocessing.get_context("fork").Process(target=hold, args=(step, tmp_path))
    holder.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    assert penstock(*prune).last["pruned"] == [str(other.path)]
    holder.kill()
    holder.join()
    assert penstock(*prune).last["pruned"] == [str(step.path)]
    assert not list(tmp_path.glob(".in_use/*.json"))


def test_what_comes_into_use_after_it_was_chosen_is_not_deleted(tmp_path):
    step = step_of(Prepare(), tmp_path)
    get_or_build(step)
    entries = list(find_entries([str(tmp_path)]))
    doomed = choose_prunable(entries, keep_last=0, older_than=0)
    assert [entry.where for entry in doomed] == [str(step.path)]
    with pin_artifacts([step]):
        assert prune(entries, doomed, [], 0, Console(), dry_run=False)["pruned"] == []
    assert step.path.is_dir()


def test_marks_that_are_set_while_the_gate_is_waited_for_count(tmp_path):
    step, found = step_of(Prepare(), tmp_path), []

    def look():
        with block_new_pins(tmp_path) as marked:
            found.append(marked())

    (tmp_path / PINS_FOLDER).mkdir()
    gate = FileLock(tmp_path / PINS_FOLDER / GATE_LOCK)
    gate.acquire()
    looking = threading.Thread(target=look)
    looking.start()
    mark = tmp_path / PINS_FOLDER / "0.json"
    held = FileLock(mark.with_suffix(".lock"))
    held.acquire()
    write_json(mark, [stage_key(step.stage)])
    gate.release()
    looking.join(60)
    held.release()
    assert found == [{stage_key(step.stage)}]


def test_a_mark_that_was_damaged_protects_everything_and_is_named(tmp_path):
    step = step_of(Prepare(), tmp_path)
    get_or_build(step)
    with pin_artifacts([step]):
        [mark] = tmp_path.glob(".in_use/*.json")
        mark.write_text(mark.read_text().replace(stage_key(step.stage)[:4], "0000"))
        with pytest.raises(ArtifactError, match=rf"{mark.name} is damaged"):
            choose_prunable(list(find_entries([str(tmp_path)])), keep_last=0, older_than=0)


class LockOfAnotherUser:
    """A lock file that this user may read and not write: FileLock cannot take it."""

    def __init__(self, lock_file):
        self.lock_file = str(lock_file)

    def acquire(self, **_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), self.lock_file)


def test_pins_of_another_user_hold_as_long_as_its_process_lives(tmp_path, monkeypatch):
    step = step_of(Prepare(), tmp_path)
    with pin_artifacts([step]):
        [pin] = tmp_path.glob(".in_use/*.json")
        content = pin.read_bytes()
        with monkeypatch.context() as patched:
            patched.setattr(in_use, "FileLock", LockOfAnotherUser)
            assert pinned_keys(tmp_path) == {stage_key(step.stage)}
    pin.write_bytes(content)
    pin.with_suffix(".lock").touch()
    monkeypatch.setattr(in_use, "FileLock", LockOfAnotherUser)
    assert pinned_keys(tmp_path) == set()


def test_an_export_that_a_run_leads_to_is_not_pruned_until_the_run_leads_elsewhere(tmp_path):
    run = RunConfig.model_validate(
        {"data": {"datasets": [{"path": "x"}]}, "train": {"output_dir": str(tmp_path / "out")}}
    )
    (tmp_path / "out").mkdir()
    steps = [
        step_of(Export(LettersSettings(letters=each)), tmp_path / "artifacts") for each in "xy"
    ]
    prune_all = ("artifacts", "prune", "--root", tmp_path / "artifacts", "--keep-last", "0")
    for step in steps:
        outcome = get_or_build(step)
        (step.path / "hf").mkdir()
        link_exported(outcome, run)
    first, second = steps
    assert (tmp_path / "out" / "hf").resolve() == second.path / "hf"
    assert penstock(*prune_all, "--json").last["pruned"] == [str(first.path)]
    assert second.path.is_dir()
    (tmp_path / "out" / "hf").unlink()
    assert penstock(*prune_all, "--json").last["pruned"] == [str(second.path)]
    assert not list((tmp_path / "artifacts/export").glob(".links/*"))


def test_a_run_leads_to_its_latest_export_and_to_nothing_that_an_older_one_had(tmp_path):
    run = RunConfig.model_validate(
        {"data": {"datasets": [{"path": "x"}]}, "train": {"output_dir": str(tmp_path / "out")}}
    )
    (tmp_path / "out").mkdir()
    parts = {"x": ("hf", "adapter"), "y": ("adapter",), "z": ("hf",)}
    step = outcome = None
    for letters, folders in parts.items():
        step = step_of(Export(LettersSettings(letters=letters)), tmp_path / "artifacts")
        outcome = get_or_build(step)
        for folder in folders:
            (step.path / folder).mkdir()
        link_exported(outcome, run)
        links = {link.name: link.resolve() for link in (tmp_path / "out").iterdir()}
        assert links == {folder: (step.path / folder).resolve() for folder in folders}
    assert step
    assert outcome
    moved = tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
    assert (moved / "out" / "hf").resolve() == moved / step.path.relative_to(tmp_path) / "hf"
    assert find_links(moved / step.path.relative_to(tmp_path)) == [moved / "out" / "hf"]
    shutil.copytree(moved, tmp_path, symlinks=True)
    assert (tmp_path / "out" / "hf").resolve() == step.path / "hf"
    # A run's folder that is a link to one at another depth.
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "disk/runs/deep").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk/runs/deep")
    link_exported(outcome, run)
    assert (tmp_path / "out" / "hf").resolve(strict=True) == step.path / "hf"


def test_a_file_system_without_links_costs_the_link_and_not_the_export(tmp_path, monkeypatch):
    run = RunConfig.model_validate(
        {"data": {"datasets": [{"path": "x"}]}, "train": {"output_dir": str(tmp_path / "out")}}
    )
    (tmp_path / "out").mkdir()
    outcome = get_or_build(step_of(Export(LettersSettings(letters="x")), tmp_path / "artifacts"))
    (outcome.path / "hf").mkdir()

    def refuse(*_args):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    link_exported(outcome, run)
    assert not [*(tmp_path / "out").iterdir()]


def test_a_killed_deletion_leaves_no_part_of_a_result_and_the_next_one_ends_it(
    tmp_path, monkeypatch
):
    chain(tmp_path, "ab")
    doomed, _, _ = chain(tmp_path, "cd")
    real = shutil.rmtree

    def die(path, **_):
        (Path(path) / MANIFEST).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        LocalEntry(None, doomed.path).delete()
    monkeypatch.setattr(shutil, "rmtree", real)
    assert not doomed.path.exists()
    assert penstock("artifacts", "prune", "--root", tmp_path).code == 0
    assert not [path for path in doomed.path.parent.iterdir() if DELETED in path.name]


def test_a_result_from_the_future_neither_counts_as_newest_nor_is_deleted(tmp_path):
    root = tmp_path / "out"
    steps = [step_of(Prepare(LettersSettings(letters=letter)), root) for letter in "abc"]
    for step, days in zip(steps, (-400, 3, 2), strict=True):
        get_or_build(step)
        age(step, days)
    options = ("--keep-last", "1", "--older-than", "1d")
    done = penstock("artifacts", "prune", "--root", root, *options, "--json")
    assert done.last["pruned"] == [str(steps[1].path)]


def test_a_result_that_is_finished_while_it_is_looked_at_is_seen_whole(tmp_path, monkeypatch):
    step = step_of(Prepare(LettersSettings(letters="ab")), tmp_path)
    get_or_build(step)
    real, reads = entries.read_manifest, []

    def late(folder):
        reads.append(folder)
        return real(folder) if len(reads) > 1 else None

    monkeypatch.setattr(entries, "read_manifest", late)
    entry = LocalEntry.read(step.path)
    assert entry
    assert entry.manifest


def hold(step, folder):
    with pin_artifacts([step]):
        (folder / "held").touch()
        time.sleep(60)
