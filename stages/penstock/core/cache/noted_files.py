"""Content-addressed files that several runs share, each with a note of its size and digest.

`<name>.arrow` is a file and `<name>.json` its note, which is written last. A process that writes a
file holds its lock, which the kernel releases when the process ends. Further files of the same
content are stored beside it as `<name>.<other>`.
"""

import logging
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from filelock import Timeout

from penstock.core.cache.digest_cache import cache_written, digest_files, digest_written
from penstock.core.cache.record import FORMAT, read_record_fields, write_record
from penstock.core.errors import ArtifactError
from penstock.core.file_lock import acquire_lock
from penstock.core.files import PART, remove

log = logging.getLogger("penstock.prepare")

Note = dict[str, Any]

DAY = 86_400.0

WriteStatus = Literal["made", "found", "busy"]
"""Written by this call, found, or being written by another run."""


def read_notes(paths: Sequence[Path]) -> dict[Path, Note]:
    """The notes of those files that exist and match their digest."""
    return _verify_digests({path: note for path in paths if (note := _read_note(path))})


def get_or_write(
    target: Path,
    write: Callable[[Path], Mapping[str, Any]],
    when_busy: Literal["wait", "skip"],
    publish: Callable[[], None] | None = None,
    is_usable: Callable[[Note], bool] = lambda _: True,
) -> WriteStatus:
    """Unless the file exists, call `write`, which writes it to the given path and returns further
    fields of its note; then `publish`. A file whose note is not usable is written again.

    If another run is writing it, waits or returns "busy" at once, as `when_busy` says.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target, when_busy) as is_mine:
        if not is_mine:
            return "busy"
        note = _read_note(target)
        is_intact = bool(note and _verify_digests({target: note}))
        status: WriteStatus = "found" if note and is_intact and is_usable(note) else "made"
        if status == "made":
            if note and not is_intact:
                log.warning("prepare: %s is damaged, and is written again", target)
            _write(target, write)
            if publish:
                publish()
        # A process that waits for this lock finds the file, so the lock file can be removed.
        remove(_lock_path(target))
    return status


def prunable(
    folder: Path,
    used: Collection[str],
    *,
    older_than: float = DAY,
    going: Collection[Path] = (),
) -> Iterator[list[Path]]:
    """The files of each name without hard links that is not in `used`.

    Skips files younger than a day (or `older_than` seconds) and locked ones: a run may be about to
    use them. Includes partial files of runs that died. Links in the folders `going`, which are
    deleted too, do not count.
    """
    loose = Counter(_inode(path) for gone in going for path in gone.rglob("*.arrow"))
    by_key: dict[str, list[Path]] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_file() and not path.name.startswith("."):
            by_key.setdefault(path.name.split(".", 1)[0], []).append(path)
    latest = time.time() - max(older_than, DAY)
    for key, paths in sorted(by_key.items()):
        is_linked = any(
            # Artifacts use a file by a hard link, so a count above 1 means that one still needs it.
            path.stat().st_nlink > 1 + loose[_inode(path)]
            for path in paths
            if path.suffix == ".arrow"
        )
        if key in used or is_linked or any(path.stat().st_mtime > latest for path in paths):
            continue
        with _lock(folder / f"{key}.arrow", "skip") as is_mine:
            if is_mine:
                # The caller deletes while this generator is suspended, thus while the lock is held.
                yield sorted(paths)


def _inode(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino


def _read_note(path: Path) -> Note | None:
    """Read the file's note; None if it is damaged or the file has another size."""
    try:
        note = read_record_fields(path.with_suffix(".json"), "It is written again.")
        return note if path.stat().st_size == note["file"]["bytes"] else None
    except (OSError, ArtifactError, KeyError, TypeError):
        return None


def _verify_digests(notes: Mapping[Path, Note]) -> dict[Path, Note]:
    try:
        digests = digest_files(notes)
    except OSError:  # One cannot be read, or was deleted meanwhile: it alone is left out.
        if len(notes) < 2:
            return {}
        singly = [_verify_digests({path: note}) for path, note in notes.items()]
        return {path: note for verified in singly for path, note in verified.items()}
    return {
        path: note
        for (path, note), digest in zip(notes.items(), digests, strict=True)
        if digest == note["file"]["sha256"]
    }


def _write(target: Path, write: Callable[[Path], Mapping[str, Any]]) -> None:
    # A unique name, and recent files of other processes are kept: another machine may see a lock
    # on a network file system late.
    for leftover in target.parent.glob(f"{target.name}.*{PART}"):
        with suppress(FileNotFoundError):
            if leftover.stat().st_mtime < time.time() - DAY:
                leftover.unlink()
    part = target.with_name(f"{target.name}.{platform.node()}-{os.getpid()}-{uuid4().hex}{PART}")
    try:
        fields = write(part)
        written, num_bytes = digest_written(part), part.stat().st_size
        part.replace(target)
        cache_written(target, written)
    finally:
        part.unlink(missing_ok=True)
    file = {"bytes": num_bytes, "mtime_ns": written.mtime_ns, "sha256": written.sha256}
    write_record(target.with_suffix(".json"), {"format": FORMAT, "file": file, **fields})


def _lock_path(target: Path) -> Path:
    return target.with_name(f".{target.stem}.lock")


@contextmanager
def _lock(target: Path, when_busy: Literal["wait", "skip"]) -> Generator[bool]:
    """Hold the file's lock during the block; yields False if another process holds it."""
    try:
        lock = acquire_lock(_lock_path(target), timeout=-1 if when_busy == "wait" else 0)
    except Timeout:
        yield False
        return
    with lock:
        yield True
