"""A shelf behind a URL, where there are neither locks nor links nor appending.

Who writes holds a lease. A number's manifest is created, never written over, after all its files;
the pointer is one small object, and every decision an object of its own.
"""

import json
import uuid
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from penstock.core.depot import Depot
from penstock.core.errors import ArtifactError, StageError
from penstock.core.files import read_json
from penstock.core.lease import Lease
from penstock.core.mirror import holder_of, home_of
from penstock.core.place import Place
from penstock.core.shelf import (
    DECISIONS,
    LATEST,
    NUMBER,
    WITHDRAWN,
    LocalShelf,
    Notify,
    Record,
    Shelf,
    absent,
    called,
)
from penstock.core.stage import MANIFEST
from penstock.core.urls import is_url

POINTER = f"{LATEST}.json"


def shelf_of(location: str) -> Shelf:
    """The shelf in a folder or behind a URL, whether or not something stands there."""
    return RemoteShelf(location) if is_url(location) else LocalShelf(home_of(location))


class RemoteShelf(Shelf):
    """A shelf in an object store. What is asked for is fetched into a mirror of it here."""

    def __init__(self, url: str) -> None:
        self._root = Place.of(url)
        self._mirror = home_of(url)
        self._lease: Lease | None = None

    @property
    def where(self) -> str:
        """Its URL."""
        return self._root.said

    @contextmanager
    def writing(self, notify: Notify) -> Generator[None]:
        """Hold its lease."""
        lease = Lease(self._root, f"{holder_of()}-{uuid.uuid4().hex}")
        lease.take(lambda: False, notify)
        with lease:
            self._lease = lease
            try:
                yield
            finally:
                self._lease = None

    def numbers(self) -> list[int]:
        """Those whose manifest is there."""
        return sorted(
            int(name)
            for name in self._root.names()
            if NUMBER.fullmatch(name) and (self._root / name / MANIFEST).info()
        )

    def manifest(self, number: int) -> Record:
        """What a number is."""
        found = self._read(f"{called(number)}/{MANIFEST}")
        if found is None:
            raise absent(self.where, number)
        return found

    def folder(self, number: int) -> Path:
        """A copy here, every byte of it checked when it was fetched."""
        manifest, folder = self.manifest(number), self._mirror / called(number)
        with suppress(OSError, ValueError):
            if read_json(folder / MANIFEST) == manifest:
                return folder
        Depot((self._root / called(number)).url, folder).fetch(manifest)
        return folder

    def latest(self) -> int | None:
        """The number in the pointer."""
        found: Any = self._read(POINTER)
        if found is None:
            return None
        number: Any = cast("dict[str, Any]", found).get("number") if isinstance(found, dict) else 0
        if not isinstance(number, int) or not (self._root / called(number) / MANIFEST).info():
            raise ArtifactError(
                f"{self.where}/{POINTER} names no release that is there.\n"
                "  Point it to one with penstock releases rollback --to NUMBER."
            )
        return number

    def add(
        self, manifest_of: Callable[[int], Record], files: Mapping[str, Path], stored: str | None
    ) -> int:
        """Have the store copy the files, or send them, and create the manifest."""
        number = max(self.numbers(), default=0) + 1
        folder = self._root / called(number)
        for name in folder.files():  # of one who died before it had its manifest
            (folder / name).delete()
        there = Place.of(stored).files() if stored else {}
        for name, source in files.items():
            if stored and name in there:
                (Place.of(stored) / name).copy(folder / name)
            else:
                (folder / name).put(source)
        self._check()
        content = json.dumps(manifest_of(number), indent=2, sort_keys=True).encode()
        if not (folder / MANIFEST).create(content):
            raise StageError(
                f"{folder.said} was written by another machine in the same moment.\n"
                "  Run it again: what stands there is looked at first."
            )
        return number

    def point(self, number: int, withdrawn: Collection[int]) -> None:
        """Write the pointer over the old one."""
        self._check()
        (self._root / WITHDRAWN).write(json.dumps(sorted(withdrawn)).encode())
        (self._root / POINTER).write(json.dumps({"number": number}).encode())

    def drop(self, number: int) -> None:
        """Remove it there, its manifest first, and here."""
        Depot((self._root / called(number)).url, self._mirror / called(number)).delete()

    def tell(self, decision: Record) -> None:
        """Write an object whose name sorts by time."""
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
        name = f"{DECISIONS}/{now}-{uuid.uuid4().hex[:8]}.json"
        (self._root / name).write(json.dumps(decision, sort_keys=True).encode())

    def decisions(self) -> list[Record]:
        """Every record, one object after another."""
        folder = self._root / DECISIONS
        contents = ((folder / name).read() for name in folder.files())
        return [json.loads(content) for content in contents if content]

    def _withdrawn(self) -> list[int]:
        return self._read(WITHDRAWN) or []

    def _check(self) -> None:
        if self._lease:
            self._lease.check()

    def _read(self, name: str) -> Any:
        content = (self._root / name).read()
        try:
            return None if content is None else json.loads(content)
        except ValueError as error:
            raise ArtifactError(
                f"{self.where}/{name} cannot be read: it is not JSON.\n"
                "  Restore it, or delete it and point to a release with penstock releases rollback."
            ) from error
