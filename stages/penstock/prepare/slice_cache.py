"""Slice cache shared by all runs: `<dataset_prepared_path>/slices/<key16>.arrow`.

`<key16>.json` is written last: record counts, and size and digest of the file. A process that
tokenizes a slice holds its lock, which the kernel releases when the process ends. Features computed
from a slice are stored beside it as `<key16>.<name>`.
"""

import errno
import logging
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from filelock import FileLock, Timeout

from penstock.core.cache.digests import cache_digests, digest_files, sha256_file
from penstock.core.cache.record import FORMAT, read_record_fields, write_record
from penstock.core.errors import ArtifactError, StageError
from penstock.core.files import PART, remove
from penstock.core.remote.shared_files import Files, SharedCache
from penstock.prepare.bad_records import Tally
from penstock.prepare.slices import Slice, TokenizedSlice

log = logging.getLogger("penstock.prepare")

FIELDS_BEFORE_DIGEST = frozenset({"format", "file", "tally"})
"""Fields of JSON files that were written before they contained their own digest."""

Note = dict[str, Any]

DAY = 86_400.0

NO_LOCK_ERRNOS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors of a file system without locks. There, two runs may tokenize a slice at the same time;
both write the same bytes atomically."""

SliceStatus = Literal["made", "found", "busy"]
"""Tokenized by this call, found in the cache, or being tokenized by another run."""


@dataclass(frozen=True)
class SliceCache:
    """The folder of all slices."""

    folder: Path
    shared: SharedCache | None = None
    """The same cache at a URL, shared by all machines."""

    def slice_path(self, item: Slice) -> Path:
        """Path of the slice's file, which may not exist yet."""
        return self.folder / f"{item.content}.arrow"

    def lookup(self, slices: Sequence[Slice]) -> list[TokenizedSlice | None]:
        """Each slice with its file and counts; None for a slice that is missing or damaged."""
        paths = [self.slice_path(item) for item in slices]
        notes = _verify_digests({path: note for path in paths if (note := _read_note(path))})
        return [
            (item, path, Tally.from_json(notes[path]["tally"])) if path in notes else None
            for item, path in zip(slices, paths, strict=True)
        ]

    def exchange(self, slices: Sequence[Slice]) -> None:
        """Download slices that other machines have tokenized, and upload those that they lack."""
        if self.shared:
            self.shared.exchange({_file_names(item) for item in slices})

    def get_or_tokenize(
        self, item: Slice, tokenize: Callable[[Path], Tally], when_busy: Literal["wait", "skip"]
    ) -> SliceStatus:
        """Unless the slice is cached, call `tokenize`, which writes it to the given path.

        If another run is tokenizing it, waits or returns "busy" at once, as `when_busy` says.
        """
        target = self.slice_path(item)
        self.folder.mkdir(parents=True, exist_ok=True)
        with _slice_lock(target, when_busy) as is_mine:
            if not is_mine:
                return "busy"
            note = _read_note(target)
            made: SliceStatus = "found" if note and _verify_digests({target: note}) else "made"
            if made == "made":
                if note:
                    log.warning("prepare: %s is damaged, and is tokenized again", target)
                _publish(target, tokenize)
                if self.shared:
                    self.shared.send(_file_names(item))
            # A process that waits for this lock finds the slice, so the lock file can be removed.
            remove(_lock_path(target))
        return made


def prunable(
    folder: Path,
    used: Collection[str],
    *,
    older_than: float = DAY,
    going: Collection[Path] = (),
) -> Iterator[list[Path]]:
    """The files of each cached slice without hard links whose key is not in `used`.

    Skips files younger than a day (or `older_than` seconds) and locked slices: a run may be about
    to use them. Includes partial files of runs that died. Links in the folders `going`, which are
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
            path.stat().st_nlink > 1 + loose[_inode(path)]
            for path in paths
            if path.suffix == ".arrow"
        )
        if key in used or is_linked or any(path.stat().st_mtime > latest for path in paths):
            continue
        with _slice_lock(folder / f"{key}.arrow", "skip") as is_mine:
            if is_mine:
                yield sorted(paths)


def _inode(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino


def _file_names(item: Slice) -> Files:
    return f"{item.content}.arrow", f"{item.content}.json"


def _read_note(path: Path) -> Note | None:
    """Read the slice's JSON file; None if it is damaged or its Arrow file has another size."""
    try:
        note = read_record_fields(
            path.with_suffix(".json"), FIELDS_BEFORE_DIGEST, "It is written again."
        )
        return note if path.stat().st_size == note["file"]["bytes"] else None
    except (OSError, ArtifactError, KeyError, TypeError):
        return None


def _verify_digests(notes: Mapping[Path, Note]) -> dict[Path, Note]:
    """Notes whose files match their digest. Digests are cached until a file changes."""
    try:
        digests = digest_files(notes, "ctime")
    except OSError:  # one was deleted meanwhile
        return {path: note for path, note in notes.items() if path.is_file()}
    return {
        path: note
        for (path, note), digest in zip(notes.items(), digests, strict=True)
        if digest == note["file"]["sha256"]
    }


def _publish(target: Path, tokenize: Callable[[Path], Tally]) -> None:
    # A unique name, and recent files of other processes are kept: on a file system without locks
    # several processes may write the same slice.
    for leftover in target.parent.glob(f"{target.name}.*{PART}"):
        with suppress(FileNotFoundError):
            if leftover.stat().st_mtime < time.time() - DAY:
                leftover.unlink()
    part = target.with_name(f"{target.name}.{platform.node()}-{os.getpid()}-{uuid4().hex}{PART}")
    try:
        tally = tokenize(part)
        digest, stat = sha256_file(part), part.stat()
        part.replace(target)
        cache_digests([(target, digest)])
    finally:
        part.unlink(missing_ok=True)
    file = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": digest}
    note = {"format": FORMAT, "file": file, "tally": tally.as_json()}
    write_record(target.with_suffix(".json"), note)


def _lock_path(target: Path) -> Path:
    return target.with_name(f".{target.stem}.lock")


@contextmanager
def _slice_lock(target: Path, when_busy: Literal["wait", "skip"]) -> Iterator[bool]:
    """Hold the slice's lock during the block; yields False if another process holds it."""
    lock = FileLock(_lock_path(target))
    try:
        lock.acquire(timeout=-1 if when_busy == "wait" else 0)
    except Timeout:
        yield False
        return
    except OSError as error:
        if error.errno not in NO_LOCK_ERRNOS:
            raise StageError(
                f"{target} cannot be locked: {error.strerror or error}.\n"
                "  data.dataset_prepared_path must be a folder that this user can write to."
            ) from error
        yield True
        return
    try:
        yield True
    finally:
        lock.release()
