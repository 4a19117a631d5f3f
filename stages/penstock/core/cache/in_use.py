"""Results that a process works with, so that nobody deletes them under its hands.

A mark is a file in the root that the results lie in, `.in_use/<name>.json`, and a lock beside it
that the kernel frees when its process dies, however that happens. Marks are set, and results
deleted, behind one gate: a result is either marked before it is looked at, or gone before.
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
    """Mark the results of the steps, those that are not there yet too, while the block runs.

    A root that this user may not write to is left unmarked.
    """
    keys: defaultdict[Path, list[str]] = defaultdict(list)
    for step in steps:
        key = stage_key(step.stage)
        if step.path.name == key[: len(step.path.name)]:  # else its folder is a person's own
            keys[step.path.parent.parent].append(key)
    with ExitStack() as held:
        for root, its in keys.items():
            with suppress(OSError):
                held.enter_context(_mark(root, its))
        yield


@contextmanager
def unless_in_use(root: Path) -> Generator[Callable[[], set[str]]]:
    """Keep new marks from the root while the block runs, and say which keys are marked there."""
    marks = root / MARKS
    marks.mkdir(parents=True, exist_ok=True)
    with FileLock(marks / GATE):
        yield lambda: _marked(marks)


def keys_in_use(root: Path) -> set[str]:
    """The keys that are marked in the root just now."""
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
    """Remove what killed processes left; behind the gate, where nobody is just setting a mark."""
    _marked(marks)
    for file in marks.glob("*.lock"):
        if file.name == GATE or file.with_suffix(".json").exists():
            continue
        lock = FileLock(file)
        with suppress(OSError):  # it is held, or not this user's
            lock.acquire(timeout=0)
            _unmark(file.with_suffix(".json"), lock)


def _marked(marks: Path) -> set[str]:
    """Keys of marks whose processes live; marks of the dead are removed."""
    found: set[str] = set()
    for mark in sorted(marks.glob("*.json")):
        lock = FileLock(mark.with_suffix(".lock"))
        try:
            lock.acquire(timeout=0)
        except OSError:  # it is held (Timeout is one), or not this user's
            with suppress(FileNotFoundError):
                found |= set(_keys_in(mark))
        else:
            _unmark(mark, lock)
    return found


def _keys_in(mark: Path) -> list[str]:
    """The keys of a mark. Raises ArtifactError for one that is damaged: what it protects is not
    known then."""
    keys = read_json(mark)
    digest, _, rest = mark.stem.partition("-")
    if rest and digest != _digest(keys):  # earlier names have no digest
        raise ArtifactError(
            f"{mark} is damaged, so it is not known which results a run at work here needs.\n"
            "  Wait until that run has ended: its mark goes then."
        )
    return keys


def _digest(keys: list[str]) -> str:
    return short(digest_json(keys))
