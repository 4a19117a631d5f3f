"""Numbered folders that never change once they are there, and a pointer to one of them.

`<shelf>/0001/…` with `manifest.json`, `latest`, `withdrawn.json` and `decisions.jsonl`. A number is
there whole or not at all: a folder is filled aside and renamed, behind a URL its manifest comes
last. The pointer moves in one step: here it is a symbolic link that is renamed over the one
before, behind a URL the object `latest.json`. One writes at a time, so no number is given twice.
"""

import json
import os
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from filelock import FileLock, Timeout

from penstock.core.cache.digests import links_made
from penstock.core.cache.manifest import MANIFEST, read_manifest
from penstock.core.cache.record import parse_record, write_record
from penstock.core.errors import ArtifactError
from penstock.core.files import PART, fsync, link, remove
from penstock.core.remote.path import checked

LATEST = "latest"
WITHDRAWN = "withdrawn.json"
WITHDRAWN_NUMBERS = "numbers"
DECISIONS = "decisions"
NUMBER = re.compile(r"\d{4,9}")

Record = dict[str, Any]
Notify = Callable[[str], None]


class ReleaseStore(ABC):
    """What stands in one place. Whoever changes it does so within `writing`."""

    @property
    @abstractmethod
    def where(self) -> str:
        """Its folder, or its URL."""

    @abstractmethod
    def writing(self, notify: Notify) -> AbstractContextManager[None]:
        """Wait until nobody else changes the shelf, saying so once, and keep others waiting."""

    @abstractmethod
    def numbers(self) -> list[int]:
        """What is there whole, in order."""

    @abstractmethod
    def manifest(self, number: int) -> Record:
        """What a number is. Raises ArtifactError where there is none."""

    @abstractmethod
    def folder(self, number: int) -> Path:
        """Its files on this machine; they must not be written to."""

    @abstractmethod
    def latest(self) -> int | None:
        """The number that is pointed to. Raises ArtifactError for a pointer that is damaged."""

    @abstractmethod
    def add(
        self, manifest_of: Callable[[int], Record], files: Mapping[str, Path], stored: str | None
    ) -> int:
        """Put files there under the next number, whose manifest `manifest_of` makes, and return it.

        `stored` is a URL where they lie under the same names already, so that a store need only
        copy them. The pointer stays.
        """

    @abstractmethod
    def point(self, number: int, withdrawn: Collection[int]) -> None:
        """Move the pointer, and say which numbers are not to be pointed to of one's own accord."""

    @abstractmethod
    def drop(self, number: int) -> None:
        """Remove a number that is not pointed to."""

    @abstractmethod
    def tell(self, decision: Record) -> None:
        """Keep a record of what was decided."""

    @abstractmethod
    def decisions(self) -> list[Record]:
        """All records, the oldest first."""

    @abstractmethod
    def _withdrawn(self) -> list[int]:
        """Numbers that the pointer was moved away from."""

    @property
    def withdrawn(self) -> set[int]:
        """As `point` was told; what is pointed to is not among them."""
        return set(self._withdrawn()) - {self.latest()}


class LocalShelf(ReleaseStore):
    """A shelf that is a folder of this machine, or of a file system that several share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def where(self) -> str:
        """The folder."""
        return str(self._folder)

    @contextmanager
    def writing(self, notify: Notify) -> Generator[None]:
        """Hold its lock, which the kernel frees when the holder dies, and sweep what one left."""
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            notify(f"{self._folder} is being written to by another process; waiting for it")
            lock.acquire()
        try:
            for leftover in self._folder.glob(f".*{PART}"):
                remove(leftover)
            yield
        finally:
            lock.release()

    def numbers(self) -> list[int]:
        """What is there whole, in order."""
        found = self._folder.iterdir() if self._folder.is_dir() else ()
        return sorted(int(path.name) for path in found if NUMBER.fullmatch(path.name))

    def manifest(self, number: int) -> Record:
        """What a number is."""
        found = read_manifest(self.folder(number))
        if found is None:
            raise absent(self.where, number)
        return found

    def folder(self, number: int) -> Path:
        """Its folder."""
        return self._folder / release_folder_name(number)

    def latest(self) -> int | None:
        """The number that the link leads to."""
        pointer = self._folder / LATEST
        if not pointer.is_symlink():
            return None
        target = pointer.readlink()
        if not NUMBER.fullmatch(str(target)) or not (self._folder / target / MANIFEST).is_file():
            raise ArtifactError(
                f"{pointer} leads to {target}, and there is no release.\n"
                "  Point it to one with penstock releases rollback --to NUMBER."
            )
        return int(str(target))

    def add(
        self, manifest_of: Callable[[int], Record], files: Mapping[str, Path], stored: str | None
    ) -> int:
        """Link the files into a new folder: they cost no space, and outlive those they are of."""
        del stored
        number = max(self.numbers(), default=0) + 1
        part = self._folder / f".{uuid.uuid4().hex}{PART}"
        with links_made(files.values()):
            for name, source in files.items():
                target = part / checked(name)
                target.parent.mkdir(parents=True, exist_ok=True)
                link(source, target)
        write_record(part / MANIFEST, manifest_of(number))
        for folder in {path.parent for path in part.rglob("*")}:
            fsync(folder)
        # A folder is never renamed over one that holds something.
        part.rename(self.folder(number))
        fsync(self._folder)
        return number

    def point(self, number: int, withdrawn: Collection[int]) -> None:
        """Rename a new link over the old one."""
        write_record(self._folder / WITHDRAWN, {WITHDRAWN_NUMBERS: sorted(withdrawn)})
        aside = self._folder / f".{LATEST}{PART}"
        aside.unlink(missing_ok=True)
        aside.symlink_to(release_folder_name(number))
        aside.replace(self._folder / LATEST)
        fsync(self._folder)

    def drop(self, number: int) -> None:
        """Remove the folder, as a whole."""
        part = self._folder / f".{release_folder_name(number)}{PART}"
        self.folder(number).rename(part)
        remove(part)

    def tell(self, decision: Record) -> None:
        """Append a line in one step."""
        self._folder.mkdir(parents=True, exist_ok=True)
        line = json.dumps(decision, sort_keys=True, ensure_ascii=False) + "\n"
        file = self._folder / f"{DECISIONS}.jsonl"
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def decisions(self) -> list[Record]:
        """Every line that can be read."""
        found: list[Record] = []
        with suppress(FileNotFoundError):
            text = (self._folder / f"{DECISIONS}.jsonl").read_text(encoding="utf-8")
            for line in text.splitlines():
                with suppress(ValueError):  # one that a power cut has torn
                    found.append(json.loads(line))
        return found

    def _withdrawn(self) -> list[int]:
        path = self._folder / WITHDRAWN
        return parse_withdrawn(path.read_bytes() if path.is_file() else None, str(path))


def parse_withdrawn(content: bytes | None, where: str) -> list[int]:
    """The numbers in what `withdrawn.json` holds, at first a bare list; none where there is none.

    Raises ArtifactError for what is damaged.
    """
    if content is None:
        return []
    with suppress(ValueError):
        if isinstance(numbers := json.loads(content), list):
            return cast("list[int]", numbers)
    remedy = "Delete it, and withdraw what is not to be used with penstock releases rollback."
    return parse_record(content, where, (), remedy)[WITHDRAWN_NUMBERS]


def release_folder_name(number: int) -> str:
    """The name of a number's folder."""
    return f"{number:04}"


def absent(where: str, number: int) -> ArtifactError:
    """What is said of a number that is not there, or no longer whole."""
    return ArtifactError(
        f"{where} holds no release {release_folder_name(number)} that can be read.\n"
        "  See penstock releases list."
    )
