"""Release store in an object store, which has no locks, hard links or appends.

Writers hold a lease. The manifest of a release is created after all its files and never
overwritten; the pointer is one small object, and every decision record is its own object.
"""

import json
import uuid
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from penstock.core.cache.manifest import MANIFEST, parse_manifest, read_manifest
from penstock.core.cache.record import parse_record, with_digest
from penstock.core.cache.verify import damaged_files
from penstock.core.errors import ArtifactError, StageError
from penstock.core.releases.local import (
    DECISIONS,
    LATEST,
    NUMBER,
    WITHDRAWN,
    WITHDRAWN_NUMBERS,
    LocalReleaseStore,
    Notify,
    Record,
    ReleaseStore,
    missing_release,
    parse_decisions,
    parse_withdrawn,
    release_folder_name,
)
from penstock.core.remote.artifact_sync import RemoteArtifact
from penstock.core.remote.lease import Lease
from penstock.core.remote.local_mirror import local_cache_dir, mirror_holder
from penstock.core.remote.path import RemotePath
from penstock.core.remote.urls import is_url

POINTER = f"{LATEST}.json"


def open_release_store(location: str) -> ReleaseStore:
    """Open the release store in a folder or at a URL, whether or not it has releases."""
    return (
        RemoteReleaseStore(location)
        if is_url(location)
        else LocalReleaseStore(local_cache_dir(location))
    )


class RemoteReleaseStore(ReleaseStore):
    """A release store in an object store. Files are downloaded to a local mirror on demand."""

    def __init__(self, url: str) -> None:
        self._root = RemotePath.from_url(url)
        self._mirror = local_cache_dir(url)
        self._lease: Lease | None = None

    @property
    def where(self) -> str:
        return self._root.redacted_url

    @contextmanager
    def writing(self, notify: Notify) -> Generator[None]:
        lease = Lease(self._root, f"{mirror_holder()}-{uuid.uuid4().hex}")
        # Nothing that another writer does makes this change superfluous.
        lease.acquire(lambda: False, notify)
        with lease:
            self._lease = lease
            try:
                yield
            finally:
                self._lease = None

    def numbers(self) -> list[int]:
        return sorted(
            int(name)
            for name in self._root.names()
            if NUMBER.fullmatch(name) and (self._root / name / MANIFEST).info()
        )

    def manifest(self, number: int) -> Record:
        name = f"{release_folder_name(number)}/{MANIFEST}"
        content = (self._root / name).read()
        if content is None:
            raise missing_release(self.where, number)
        return parse_manifest(content, f"{self.where}/{name}", _REMEDY)

    def folder(self, number: int) -> Path:
        manifest, folder = self.manifest(number), self._mirror / release_folder_name(number)
        with suppress(ArtifactError):
            is_here = read_manifest(folder) == manifest
            if is_here and not damaged_files(folder, manifest["files"], "changed"):
                return folder
        RemoteArtifact((self._root / release_folder_name(number)).url, folder).fetch(manifest)
        return folder

    def latest(self) -> int | None:
        content = (self._root / POINTER).read()
        if content is None:
            return None
        pointer = parse_record(content, f"{self.where}/{POINTER}", _REMEDY)
        number = pointer.get("number")
        if (
            not isinstance(number, int)
            or not (self._root / release_folder_name(number) / MANIFEST).info()
        ):
            raise ArtifactError(
                f"{self.where}/{POINTER} names a release that does not exist.\n"
                "  Point it to one with penstock releases rollback --to NUMBER."
            )
        return number

    def add(
        self, manifest_of: Callable[[int], Record], files: Mapping[str, Path], stored: str | None
    ) -> int:
        number = max(self.numbers(), default=0) + 1
        folder = self._root / release_folder_name(number)
        for name in folder.files():  # Left by a writer that died before it created the manifest.
            (folder / name).delete()
        stored_files = RemotePath.from_url(stored).files() if stored else {}
        for name, source in files.items():
            if stored and name in stored_files:
                (RemotePath.from_url(stored) / name).copy(folder / name)
            else:
                (folder / name).put(source)
        # The copies above may take longer than the lease lasts.
        self._check_lease()
        content = _to_json(manifest_of(number))
        if not (folder / MANIFEST).create(content):
            raise StageError(
                f"{folder.redacted_url} was written by another machine at the same time.\n"
                "  Run it again: existing releases are read first."
            )
        return number

    def set_latest(self, number: int, withdrawn: Collection[int]) -> None:
        self._check_lease()
        # In this order, as in a local store: `withdrawn` leaves out what is still the latest.
        (self._root / WITHDRAWN).write(_to_json({WITHDRAWN_NUMBERS: sorted(withdrawn)}))
        (self._root / POINTER).write(_to_json({"number": number}))

    def delete(self, number: int) -> None:
        RemoteArtifact(
            (self._root / release_folder_name(number)).url,
            self._mirror / release_folder_name(number),
        ).delete()

    def append_decision(self, decision: Record) -> None:
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
        # Listings are sorted by name, so decisions are read oldest first.
        name = f"{DECISIONS}/{now}-{uuid.uuid4().hex[:8]}.json"
        (self._root / name).write(json.dumps(decision, sort_keys=True).encode())

    def decisions(self) -> list[Record]:
        folder = self._root / DECISIONS
        files = [folder / name for name in folder.files()]
        return parse_decisions((file.read() or b"", file.redacted_url) for file in files)

    def _withdrawn(self) -> list[int]:
        return parse_withdrawn((self._root / WITHDRAWN).read(), f"{self.where}/{WITHDRAWN}")

    def _check_lease(self) -> None:
        if self._lease:
            self._lease.check()


_REMEDY = "Restore it, or delete it and point to a release with penstock releases rollback."


def _to_json(record: Record) -> bytes:
    return json.dumps(with_digest(record), indent=2, sort_keys=True).encode()
