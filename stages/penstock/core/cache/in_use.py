"""Pins on artifacts that a process uses, so that pruning does not delete them.

A pin is a file `.in_use/<name>.json` in the artifact root, with a lock file that the kernel
releases when the process dies. Setting a pin and deleting artifacts take the same lock, so an
artifact is either pinned before it is read or already deleted.
"""

import uuid
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import short, stage_key
from penstock.core.cache.store import PlannedStage
from penstock.core.errors import ArtifactError
from penstock.core.files import read_json, write_json

MARKS = ".in_use"
GATE = "gate.lock"


@contextmanager
def in_use(steps: Iterable[PlannedStage]) -> Generator[None]:
    """Pin the results of the steps, including those not built yet, while the block runs.

    A root without write permission is not pinned.
    """
    keys: defaultdict[Path, list[str]] = defaultdict(list)
    for step in steps:
        key = stage_key(step.stage)
        if step.path.name == key[: len(step.path.name)]:  # Otherwise the user chose the folder.
            keys[step.path.parent.parent].append(key)
    with ExitStack() as held:
        for root, its in keys.items():
            with suppress(OSError):
                held.enter_context(_mark(root, its))
        yield


@contextmanager
def unless_in_use(root: Path) -> Generator[Callable[[], set[str]]]:
    """Block new pins in the root while the block runs; yields a function that returns the pinned
    keys."""
    marks = root / MARKS
    marks.mkdir(parents=True, exist_ok=True)
    with FileLock(marks / GATE):
        yield lambda: _marked(marks)


def keys_in_use(root: Path) -> set[str]:
    """Return the keys that are currently pinned in the root."""
    return _marked(root / MARKS)


def _mark(root: Path, keys: list[str]) -> ExitStack:
    marks = root / MARKS
    marks.mkdir(parents=True, exist_ok=True)
    mark = marks / f"{_digest(keys)}-{uuid.uuid4().hex}.json"
    held = ExitStack()
    with FileLock(marks / GATE):
        _remove_stale(marks)
        lock = FileLock(mark.with_suffix(".lock"))
        lock.acquire()
        held.callback(_unmark, mark, lock)
        write_json(mark, keys)
    return held


def _unmark(mark: Path, lock: FileLock) -> None:
    mark.unlink(missing_ok=True)
    lock.release()
    Path(lock.lock_file).unlink(missing_ok=True)


def _remove_stale(marks: Path) -> None:
    """Remove pins of killed processes. Requires the lock, so that no process is setting a pin."""
    _marked(marks)
    for file in marks.glob("*.lock"):
        if file.name == GATE or file.with_suffix(".json").exists():
            continue
        lock = FileLock(file)
        with suppress(OSError):  # The pin is in use, or belongs to another user.
            lock.acquire(timeout=0)
            _unmark(file.with_suffix(".json"), lock)


def _marked(marks: Path) -> set[str]:
    """Return the pinned keys of live processes; remove pins of dead processes."""
    found: set[str] = set()
    for mark in sorted(marks.glob("*.json")):
        lock = FileLock(mark.with_suffix(".lock"))
        try:
            lock.acquire(timeout=0)
        except OSError:  # The pin is in use (Timeout), or belongs to another user.
            with suppress(FileNotFoundError):
                found |= set(_keys_in(mark))
        else:
            _unmark(mark, lock)
    return found


def _keys_in(mark: Path) -> list[str]:
    """Return the keys of a pin. Raises ArtifactError for a damaged pin, because the artifacts that
    it protects are unknown."""
    keys = read_json(mark)
    digest, _, rest = mark.stem.partition("-")
    if rest and digest != _digest(keys):  # Pins of earlier versions have no digest.
        raise ArtifactError(
            f"{mark} is damaged, so it is not known which results a run at work here needs.\n"
            "  Wait until that run has ended: its mark goes then."
        )
    return keys


def _digest(keys: list[str]) -> str:
    return short(digest_json(keys))
