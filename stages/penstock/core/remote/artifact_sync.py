"""Upload and download of artifacts; the manifest is uploaded last and files are verified.

Uploaded files are recorded beside the mirror folder with the version that the store returned, so
that an interrupted upload resumes and no file is sent twice.
"""

import hashlib
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from penstock.core.cache.manifest import MANIFEST, parse_manifest
from penstock.core.cache.record import parse_record
from penstock.core.cache.stage import ATTEMPT, ERROR_LOG
from penstock.core.errors import ArtifactError
from penstock.core.files import atomic_write, read_json, remove, write_json
from penstock.core.remote.lease import LEASES, Lease
from penstock.core.remote.local_mirror import mirror_holder
from penstock.core.remote.open import open_file
from penstock.core.remote.path import Info, RemotePath, require_relative
from penstock.core.remote.urls import split_parent
from penstock.core.remote.version import content_version

MAX_CONCURRENT_TRANSFERS = 8
"""Concurrent transfers."""

CHUNK = 4 << 20


class RemoteArtifact:
    """A remote artifact and the local folder that mirrors it."""

    def __init__(self, url: str, folder: Path) -> None:
        self.root = RemotePath.from_url(url)
        self.folder = folder
        self._sent_file = folder.with_name(f".{folder.name}.sent.json")
        self._sent: dict[str, dict[str, Any]] = _read_sent_files(self._sent_file)
        self._sent_by_this_run: dict[str, dict[str, Any]] = {}
        self._writing = threading.Lock()

    def lease(self) -> Lease:
        return Lease(self.root, mirror_holder())

    def manifest(self) -> dict[str, Any] | None:
        """The remote manifest, or None. Raises ArtifactError if it is damaged."""
        return self._record(MANIFEST)

    def attempt(self) -> dict[str, Any] | None:
        return self._record(ATTEMPT)

    def publish(self, manifest: dict[str, Any], lease: Lease) -> None:
        """Upload the files that the manifest lists, then the manifest. An existing one is deleted
        first, so that no manifest exists before its files."""
        (self.root / MANIFEST).delete()
        self._sent_by_this_run = {}
        self.send([str(file["path"]) for file in manifest["files"]])
        # After the upload, which may outlast the lease: another machine's manifest is not
        # overwritten.
        lease.check()
        (self.root / MANIFEST).write((self.folder / MANIFEST).read_bytes())
        (self.root / ATTEMPT).delete()
        lease.clear()

    def delete_unlisted(self, manifest: dict[str, Any]) -> None:
        listed = {str(file["path"]) for file in manifest["files"]} | {MANIFEST}
        for name in self.root.files():
            if name not in listed and not name.startswith(LEASES):
                (self.root / name).delete()

    def send(self, names: Sequence[str]) -> int:
        """Upload those files of the mirror that differ from the remote ones; return how many."""
        changed = [
            name
            for name in names
            if self._sent_by_this_run.get(name) != _file_stamp(self.folder / name)
        ]
        if not changed:
            return 0
        remote_files = self.root.files()
        changed = [name for name in changed if not self._is_there(name, remote_files.get(name))]
        with ThreadPoolExecutor(MAX_CONCURRENT_TRANSFERS) as pool:
            for job in [pool.submit(self._send, name) for name in changed]:
                job.result()
        return len(changed)

    def drop(self, name: str) -> None:
        (self.root / name).delete()
        self._sent.pop(name, None)
        self._sent_by_this_run.pop(name, None)

    def fetch(self, manifest: dict[str, Any]) -> None:
        """Download a complete artifact, verified against its manifest, which is written last."""
        self._fetch_all(manifest["files"])
        for mark in (ATTEMPT, ERROR_LOG):
            (self.folder / mark).unlink(missing_ok=True)
        write_json(self.folder / MANIFEST, manifest)

    def fetch_names(self, names: Iterable[str]) -> None:
        for name in names:
            self._fetch({"path": name})

    def copy_record(self, name: str, record: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / name, record)

    def move_to_backup(self) -> None:
        """Move the remote artifact to the first free `<name>.old-<n>` beside it."""
        parent, name = split_parent(self.root.url)
        number, names = 1, RemotePath.from_url(parent).names()
        while f"{name}.old-{number}" in names:
            number += 1
        aside = RemotePath.from_url(parent) / f"{name}.old-{number}"
        files = [file for file in self.root.files() if not file.startswith(LEASES)]
        marks = [file for file in (MANIFEST, ATTEMPT) if file in files]
        # The manifest first: after a kill in between, what is left is not taken for a complete
        # artifact.
        for file in (*marks, *(file for file in files if file not in marks)):
            (self.root / file).move(aside / file)
        self._sent, self._sent_by_this_run = {}, {}

    def delete(self) -> None:
        """Delete the remote artifact, its manifest first."""
        (self.root / MANIFEST).delete()
        for name in self.root.files():
            (self.root / name).delete()
        remove(self._sent_file)

    def _record(self, name: str) -> dict[str, Any] | None:
        content = (self.root / name).read()
        if content is None:
            return None
        location, remedy = (
            f"{self.root.redacted_url}/{name}",
            "Delete it there to have it built again.",
        )
        if name == MANIFEST:
            return parse_manifest(content, location, remedy)
        return parse_record(content, location, remedy)

    def _is_there(self, name: str, info: Info | None) -> bool:
        noted = self._sent.get(name)
        if info is None or noted is None or noted.get("version") is None:
            return False
        return noted == {**_file_stamp(self.folder / name), "version": content_version(info)}

    def _send(self, name: str) -> None:
        path, remote_path = self.folder / name, self.root / name
        # Before the upload: a file that changes during it has another stamp, and is sent again.
        stamp = _file_stamp(path)
        remote_path.put(path)
        info = remote_path.info()
        with self._writing:
            self._sent_by_this_run[name] = stamp
            self._sent[name] = {**stamp, "version": content_version(info) if info else None}
            write_json(self._sent_file, self._sent)

    def _fetch_all(self, files: Sequence[dict[str, Any]]) -> None:
        with ThreadPoolExecutor(MAX_CONCURRENT_TRANSFERS) as pool:
            for job in [pool.submit(self._fetch, file) for file in files]:
                job.result()

    def _fetch(self, file: dict[str, Any]) -> None:
        """Download one file; verify `bytes` and `sha256` where `file` has them."""
        name = require_relative(str(file["path"]))
        target, expected_digest = self.folder / name, file.get("sha256")
        if expected_digest and target.is_file() and target.stat().st_size == file["bytes"]:
            with target.open("rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() == expected_digest:
                    return
        remote_path = self.root / name
        if expected_digest and remote_path.info() is None:
            raise ArtifactError(
                f"{self.root.redacted_url} has a manifest, but {name} is missing.\n"
                "  Restore it, or build again with --force."
            )
        digest = hashlib.sha256()
        with (
            atomic_write(target) as part,
            open_file(remote_path.url) as source,
            part.open("wb") as stream,
        ):
            while block := source.read(CHUNK):
                digest.update(block)
                stream.write(block)
            # Inside the block: an exception keeps atomic_write from renaming the file to its name.
            if expected_digest and digest.hexdigest() != expected_digest:
                raise ArtifactError(
                    f"{remote_path.redacted_url} differs from its manifest: its SHA-256 does not "
                    "match.\n  Restore it, or build again with --force."
                )


def _file_stamp(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _read_sent_files(notes: Path) -> dict[str, dict[str, Any]]:
    """Read the record of uploaded files. Unreadable entries are uploaded again."""
    try:
        sent = read_json(notes)
        return {name: dict(noted) for name, noted in sent.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
