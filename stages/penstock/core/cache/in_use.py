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
from penstock.core.file_lock import acquire_lock, is_locked
from penstock.core.files import read_json, write_json

PINS_FOLDER = ".in_use"
GATE_LOCK = "gate.lock"


@contextmanager
def pin_artifacts(steps: Iterable[PlannedStage]) -> Generator[None]:
    """Pin the results of the steps, including those not built yet, while the block runs. A root
    without write permission is not pinned."""
    keys: defaultdict[Path, list[str]] = defaultdict(list)
    for step in steps:
        key = stage_key(step.stage)
        if step.path.name == key[: len(step.path.name)]:  # Otherwise the user chose the folder.
            # <root>/<stage>/<key>: pins are in the root, which `penstock prune` locks as a whole.
            keys[step.path.parent.parent].append(key)
    with ExitStack() as held:
        for root, root_keys in keys.items():
            with suppress(OSError):
                held.enter_context(_pin(root, root_keys))
        yield


@contextmanager
def block_new_pins(root: Path) -> Generator[Callable[[], set[str]]]:
    """Block new pins in the root while the block runs; yields a function that returns the pinned
    keys."""
    pins = root / PINS_FOLDER
    pins.mkdir(parents=True, exist_ok=True)
    with acquire_lock(pins / GATE_LOCK):
        yield lambda: _read_pinned_keys(pins)


def pinned_keys(root: Path) -> set[str]:
    """Return the keys that are currently pinned in the root."""
    return _read_pinned_keys(root / PINS_FOLDER)


def _pin(root: Path, keys: list[str]) -> ExitStack:
    pins = root / PINS_FOLDER
    pins.mkdir(parents=True, exist_ok=True)
    pin = pins / f"{_digest(keys)}-{uuid.uuid4().hex}.json"
    held = ExitStack()
    # Not acquire_lock: its StageError would end the run, and `pin_artifacts` ignores OSError alone.
    with FileLock(pins / GATE_LOCK):
        _remove_stale(pins)
        lock = FileLock(pin.with_suffix(".lock"))
        # Locked before the pin is written: readers take an unlocked pin for that of a dead process.
        lock.acquire()
        held.callback(_unpin, pin, lock)
        write_json(pin, keys)
    return held


def _unpin(pin: Path, lock: FileLock) -> None:
    pin.unlink(missing_ok=True)
    lock.release()
    Path(lock.lock_file).unlink(missing_ok=True)


def _remove_stale(pins: Path) -> None:
    """Remove pins of killed processes. Requires the lock, so that no process is setting a pin."""
    _read_pinned_keys(pins)
    for file in pins.glob("*.lock"):
        if file.name == GATE_LOCK or file.with_suffix(".json").exists():
            continue
        lock = FileLock(file)
        with suppress(OSError):  # The pin is in use, or belongs to another user.
            lock.acquire(timeout=0)
            _unpin(file.with_suffix(".json"), lock)


def _read_pinned_keys(pins: Path) -> set[str]:
    """Return the pinned keys of live processes; remove pins of dead processes of this user."""
    pinned_keys: set[str] = set()
    for pin in sorted(pins.glob("*.json")):
        lock = FileLock(pin.with_suffix(".lock"))
        try:
            lock.acquire(timeout=0)
        # filelock's Timeout is a TimeoutError, which is an OSError: the process that set the pin is
        # alive.
        except OSError as error:
            # FileLock opens for writing, which the lock of another user's pin does not allow.
            if isinstance(error, PermissionError) and not is_locked(Path(lock.lock_file)):
                continue
            with suppress(FileNotFoundError):
                pinned_keys |= set(_read_pin(pin))
        else:
            _unpin(pin, lock)
    return pinned_keys


def _read_pin(pin: Path) -> list[str]:
    # A damaged pin is an error, because the results that it protects are unknown.
    keys = read_json(pin)
    digest, _, pid = pin.stem.partition("-")
    if pid and digest != _digest(keys):  # Pins of earlier versions have no digest.
        raise ArtifactError(
            f"{pin} is damaged, so it is unknown which results a running process needs.\n"
            "  Wait until that process ends, which removes the file."
        )
    return keys


def _digest(keys: list[str]) -> str:
    return short(digest_json(keys))
