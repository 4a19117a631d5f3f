"""Push to any writable fsspec URL; only files that differ are copied.

An index of digests is stored beside the files, so that a later push need not read them back. An
entry is removed before its file is written and restored once the file is complete.
"""

import json
import os
import posixpath
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from penstock.core.cache.digest_cache import digest_files
from penstock.core.cache.record import parse_record, with_digest
from penstock.core.errors import ArtifactError, CapabilityError, PenstockError, StageError
from penstock.core.files import PART, fsync
from penstock.core.os_errors import describe_os_error
from penstock.core.remote.errors import classify_error, describe_error, http_status
from penstock.core.remote.path import Info
from penstock.core.remote.version import content_version
from penstock.push.contents import PushFile, obsolete_files

INDEX = "penstock-push.json"

Entries = dict[str, dict[str, Any]]

_CHUNK = 8 << 20

# Writes to these stores are atomic, and renaming a file would copy it.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "r2"}


@dataclass(frozen=True)
class CopyTarget:
    """A folder on an fsspec file system."""

    url: str
    system: fsspec.AbstractFileSystem
    root: str

    @classmethod
    def open(cls, url: str) -> "CopyTarget":
        """Open the file system of the URL. Raises CapabilityError if there is none."""
        try:
            system, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise CapabilityError(
                f"push.url {url} cannot be written from here: {error}\n"
                "  Install the package it names, or use another URL."
            ) from error
        return cls(url, system, root.rstrip("/"))

    def difference(self, files: Sequence[PushFile]) -> tuple[list[str], list[str]]:
        with self._translate_errors():
            index = self._read_index()
            target_files = self._files()

            def is_as_sent(file: PushFile) -> bool:
                info, entry = target_files.get(file.name, {}), dict(index.get(file.name, {}))
                # Stores without versions have none in the index, nor do earlier releases.
                version = entry.pop("version", None)
                has_version = version is None or version == content_version(info)
                return entry == file.fact and info.get("size") == file.num_bytes and has_version

            same = list(filter(is_as_sent, files))
            if isinstance(self.system, LocalFileSystem):
                digests = digest_files(Path(self._path_at(file.name)) for file in same)
                pairs = zip(same, digests, strict=True)
                same = [file for file, digest in pairs if digest == file.sha256]
            intact = {file.name for file in same}
            send = [file.name for file in files if file.name not in intact]
            return send, obsolete_files(target_files, files)

    def prepare(self) -> None:
        """An fsspec folder is made with the first file in it."""

    def send(self, files: Sequence[PushFile], *, title: str) -> dict[str, Any]:
        """Write the files that differ, each atomically, then the index. Copies have no title, and
        give no facts.

        Raises CapabilityError if the target is not writable, StageError on failure.
        """
        del title
        send, remove = self.difference(files)
        if not send and not remove:
            return {}
        with self._translate_errors():
            by_name = {file.name: file for file in files}
            changing = {*send, *remove}
            index = {name: e for name, e in self._read_index().items() if name not in changing}
            self._write_index(index)
            for name in remove:
                self.system.rm_file(self._path_at(name))
            for name in send:
                self._upload(by_name[name])
                version = content_version(self.system.info(self._path_at(name)))
                index[name] = {**by_name[name].fact, **({"version": version} if version else {})}
                # After each file, so that a push that is interrupted sends the others alone.
                self._write_index(index)
        return {}

    def _path_at(self, name: str) -> str:
        return posixpath.join(self.root, name)

    def _files(self) -> dict[str, Info]:
        # fsspec keeps listings for the whole process, and others may have pushed since.
        self.system.invalidate_cache()
        try:
            entries: Any = self.system.find(self.root, detail=True)
        except FileNotFoundError:
            return {}
        below = self.root + "/"
        return {
            path.removeprefix(below): info
            for path, info in entries.items()
            if path.startswith(below)
        }

    def _upload(self, file: PushFile) -> None:
        with file.path.open("rb") as source, self._atomic_stream(file.name) as target:
            shutil.copyfileobj(source, target, _CHUNK)

    @contextmanager
    def _atomic_stream(self, name: str) -> Iterator[Any]:
        """A stream to a file that is created only if the block succeeds. Local files are fsynced
        before they are added to the index."""
        final = self._path_at(name)
        self.system.makedirs(posixpath.dirname(final), exist_ok=True)
        protocols = self.system.protocol
        names = {protocols} if isinstance(protocols, str) else set(protocols)
        temporary = final if names & _OBJECT_STORES else final + PART
        is_local = isinstance(self.system, LocalFileSystem)
        with self.system.open(temporary, "wb") as stream:
            yield stream
            if is_local:
                stream.flush()
                os.fsync(stream.fileno())
        if temporary != final:
            self.system.mv(temporary, final)
        if is_local:
            fsync(Path(final).parent)

    def _read_index(self) -> Entries:
        try:
            content: Any = self.system.cat_file(self._path_at(INDEX))
            record = parse_record(content, INDEX, "Push again.")
            return {entry["path"]: entry for entry in record["files"]}
        except (FileNotFoundError, ArtifactError, KeyError, TypeError):
            return {}

    def _write_index(self, index: Entries) -> None:
        value = {"format": 1, "files": [index[name] for name in sorted(index)]}
        with self._atomic_stream(INDEX) as stream:
            stream.write((json.dumps(with_digest(value), indent=2, sort_keys=True) + "\n").encode())

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except PenstockError:
            raise
        except Exception as error:
            kind = classify_error(error)
            if kind == "denied":
                reason = getattr(error, "strerror", None) or describe_error(error)
                raise CapabilityError(
                    f"push.url {self.url} is not writable: {reason}\n"
                    "  Give this account the right to write there, or use another URL."
                ) from error
            if kind == "other" and http_status(error) is None and not isinstance(error, OSError):
                raise  # neither of a store nor of this machine
            reason = describe_os_error(error) if kind == "local" else describe_error(error)
            raise StageError(
                f"push.url {self.url} failed: {reason}\n"
                "  Push again: uploaded files are not sent twice."
            ) from error
