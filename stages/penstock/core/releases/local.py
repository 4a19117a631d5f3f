"""Release store: immutable numbered releases and a `latest` pointer.

The files are `<store>/0001/…` with `manifest.json`, `latest`, `withdrawn.json` and
`decisions.jsonl`. A release appears atomically: its folder is written aside and renamed; in an
object store its manifest is written last. The pointer moves atomically: locally it is a symbolic
link that is replaced by a rename, in an object store it is the object `latest.json`. There is one
writer at a time, so each number is used once.
"""

import json
import logging
import os
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from filelock import Timeout

from penstock.core.cache.digest_cache import keep_cached_across_links
from penstock.core.cache.manifest import MANIFEST, read_manifest
from penstock.core.cache.record import parse_record, write_record
from penstock.core.errors import ArtifactError
from penstock.core.file_lock import acquire_lock
from penstock.core.files import PART, fsync, link, remove
from penstock.core.remote.path import require_relative

log = logging.getLogger("penstock.releases")

LATEST = "latest"
WITHDRAWN = "withdrawn.json"
WITHDRAWN_NUMBERS = "numbers"
DECISIONS = "decisions"
NUMBER = re.compile(r"\d{4,9}")

Record = dict[str, Any]
Notify = Callable[[str], None]


class ReleaseStore(ABC):
    """Releases in one location. Changes require `writing`."""

    @property
    @abstractmethod
    def where(self) -> str:
        """The folder or URL."""

    @abstractmethod
    def writing(self, notify: Notify) -> AbstractContextManager[None]:
        """Hold the write lock; notifies once if another process holds it."""

    @abstractmethod
    def numbers(self) -> list[int]:
        """The complete releases, in order."""

    @abstractmethod
    def manifest(self, number: int) -> Record:
        """The manifest of a release. Raises ArtifactError if there is none."""

    @abstractmethod
    def folder(self, number: int) -> Path:
        """The local folder of a release; read-only."""

    @abstractmethod
    def latest(self) -> int | None:
        """The release that `latest` points to. Raises ArtifactError for a damaged pointer."""

    @abstractmethod
    def add(
        self, manifest_of: Callable[[int], Record], files: Mapping[str, Path], stored: str | None
    ) -> int:
        """Add files as the next release, with the manifest made by `manifest_of`; return its
        number.

        `stored` is a URL that already holds the files under the same names, so that an object store
        can copy them. The pointer does not move.
        """

    @abstractmethod
    def set_latest(self, number: int, withdrawn: Collection[int]) -> None:
        """Move the pointer, and set the releases that must not be selected automatically."""

    @abstractmethod
    def delete(self, number: int) -> None:
        """Delete a release that `latest` does not point to."""

    @abstractmethod
    def append_decision(self, decision: Record) -> None:
        """Append a decision record."""

    @abstractmethod
    def decisions(self) -> list[Record]:
        """All decision records, oldest first."""

    @abstractmethod
    def _withdrawn(self) -> list[int]:
        """The releases that the pointer was moved away from."""

    @property
    def withdrawn(self) -> set[int]:
        """The releases withdrawn by `set_latest`, without the one that `latest` points to."""
        return set(self._withdrawn()) - {self.latest()}


class LocalReleaseStore(ReleaseStore):
    """A release store in a local folder or on a shared file system."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def where(self) -> str:
        return str(self._folder)

    @contextmanager
    def writing(self, notify: Notify) -> Generator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        lock_file = self._folder / ".lock"
        try:
            lock = acquire_lock(lock_file, timeout=0)
        except Timeout:
            notify(f"{self._folder} is being written to by another process; waiting for it")
            lock = acquire_lock(lock_file)
        with lock:
            # Of killed writers: whoever holds the lock is the only one that writes.
            for leftover in self._folder.glob(f".*{PART}"):
                remove(leftover)
            yield

    def numbers(self) -> list[int]:
        entries = self._folder.iterdir() if self._folder.is_dir() else ()
        return sorted(int(path.name) for path in entries if NUMBER.fullmatch(path.name))

    def manifest(self, number: int) -> Record:
        manifest = read_manifest(self.folder(number))
        if manifest is None:
            raise missing_release(self.where, number)
        return manifest

    def folder(self, number: int) -> Path:
        return self._folder / release_folder_name(number)

    def latest(self) -> int | None:
        pointer = self._folder / LATEST
        if not pointer.is_symlink():
            return None
        target = pointer.readlink()
        if not NUMBER.fullmatch(str(target)) or not (self._folder / target / MANIFEST).is_file():
            raise ArtifactError(
                f"{pointer} points to {target}, which is not a release.\n"
                "  Point it to one with penstock releases rollback --to NUMBER."
            )
        return int(str(target))

    def add(
        self, manifest_of: Callable[[int], Record], files: Mapping[str, Path], stored: str | None
    ) -> int:
        # Hard links use no space, and outlive the original files.
        del stored
        number = max(self.numbers(), default=0) + 1
        part = self._folder / f".{uuid.uuid4().hex}{PART}"
        with keep_cached_across_links(files.values()):
            for name, source in files.items():
                target = part / require_relative(name)
                target.parent.mkdir(parents=True, exist_ok=True)
                link(source, target)
        write_record(part / MANIFEST, manifest_of(number))
        for folder in {path.parent for path in part.rglob("*")}:
            # Hard links add no data, and `link` flushes what it copies; the folders are new.
            fsync(folder)
        # A rename never replaces a folder that has files.
        part.rename(self.folder(number))
        fsync(self._folder)
        return number

    def set_latest(self, number: int, withdrawn: Collection[int]) -> None:
        # Before the pointer: after a crash in between, `withdrawn` leaves out what is still the
        # latest.
        write_record(self._folder / WITHDRAWN, {WITHDRAWN_NUMBERS: sorted(withdrawn)})
        aside = self._folder / f".{LATEST}{PART}"
        aside.unlink(missing_ok=True)
        aside.symlink_to(release_folder_name(number))
        aside.replace(self._folder / LATEST)
        fsync(self._folder)

    def delete(self, number: int) -> None:
        part = self._folder / f".{release_folder_name(number)}{PART}"
        # Under its name a release is whole or gone; after a kill, the next `writing` removes the
        # rest.
        self.folder(number).rename(part)
        remove(part)

    def append_decision(self, decision: Record) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        line = json.dumps(decision, sort_keys=True, ensure_ascii=False) + "\n"
        file = self._folder / f"{DECISIONS}.jsonl"
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = f"\n{line}"  # A line that a power failure truncated stays by itself.
            # One write with O_APPEND: on a local disk, lines of two writers do not mix.
            os.write(descriptor, line.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def decisions(self) -> list[Record]:
        path = self._folder / f"{DECISIONS}.jsonl"
        try:
            lines = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        numbered = ((line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line)
        return parse_decisions(numbered)

    def _withdrawn(self) -> list[int]:
        path = self._folder / WITHDRAWN
        return parse_withdrawn(path.read_bytes() if path.is_file() else None, str(path))


def parse_decisions(contents: Iterable[tuple[bytes, str]]) -> list[Record]:
    """The records in (content, name); a warning names those that are not JSON objects, such as a
    line that a power failure truncated."""
    records: list[Record] = []
    for content, name in contents:
        record = None
        with suppress(ValueError, RecursionError):
            record = json.loads(content)
        if isinstance(record, dict):
            records.append(cast("Record", record))
        else:
            log.warning("%s is damaged, and is not read: it is not a JSON object.", name)
    return records


def parse_withdrawn(content: bytes | None, location: str) -> list[int]:
    """Parse `withdrawn.json`, which was a bare list in earlier versions; empty if there is none.
    Raises ArtifactError if it is damaged."""
    if content is None:
        return []
    with suppress(ValueError, RecursionError):
        if isinstance(numbers := json.loads(content), list):
            return cast("list[int]", numbers)
    remedy = "Delete it, and withdraw releases again with penstock releases rollback."
    return parse_record(content, location, remedy)[WITHDRAWN_NUMBERS]


def release_folder_name(number: int) -> str:
    """The folder name of a release."""
    return f"{number:04}"


def missing_release(location: str, number: int) -> ArtifactError:
    """The error for a release that is missing or incomplete."""
    return ArtifactError(
        f"{location} has no readable release {release_folder_name(number)}.\n"
        "  See penstock releases list."
    )
