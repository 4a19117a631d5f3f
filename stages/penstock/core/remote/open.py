"""Open local or remote files for reading."""

import hashlib
import io
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from penstock.core.errors import StageError
from penstock.core.process.retry import retry_until_connected
from penstock.core.remote.answers import AnswerError, ChangedError
from penstock.core.remote.errors import StorageError, to_run_error
from penstock.core.remote.path import Info, RemotePath
from penstock.core.remote.ranges import require_same
from penstock.core.remote.stream import RemoteStream
from penstock.core.remote.urls import is_url, local_path
from penstock.core.remote.version import VERSIONS, all_versions, content_version

BUFFER = 256 << 10  # Buffer size of line readers in bytes

CHUNK = 1 << 20

MIN_FREE_BYTES = 1 << 30
"""Bytes that a download of unknown length leaves free on its disk: its body may never end."""


def open_file(
    location: Path | str,
    pinned: Mapping[str, Any] | None = None,
    *,
    is_trusted: bool = True,
    max_bytes: int | None = None,
) -> BinaryIO:
    """Open a local path or URL as a seekable read-only binary stream.

    `pinned` is the file's entry in its source pin; the stream is rejected if the remote content has
    changed. `is_trusted`: whether a user wrote the URL (see `RemotePath`). A file with more than
    `max_bytes` is an error. Lost connections are resumed at the current offset. Raises StageError
    for read errors, CapabilityError if access is denied.
    """
    if isinstance(location, Path) or not is_url(location):
        return Path(local_path(str(location))).open("rb")
    path = RemotePath.from_url(location, is_trusted=is_trusted)
    info = path.info()
    if info is None:
        raise to_run_error(StorageError("absent", FileNotFoundError()), location, "read")
    if pinned is not None:
        _require_pinned(path, info, pinned)
    if max_bytes is not None and (info["size"] or 0) > max_bytes:
        raise StageError(f"it has {info['size']:,} bytes; {max_bytes:,} are allowed")
    return open_version(path, info, max_bytes)


def open_version(path: RemotePath, info: Info, max_bytes: int | None = None) -> BinaryIO:
    """Open the version of a remote file that `info` describes: in ranges, or downloaded whole if
    the server has no ranges, or reports no version that could tell two of them apart."""
    is_whole = info["size"] is None or content_version(info) is None
    if is_whole or (path.is_web and not info["partial"]):
        return _download_to_spool(path, info, max_bytes)
    return cast(BinaryIO, io.BufferedReader(RemoteStream(path, info), BUFFER))


def _require_pinned(path: RemotePath, info: Info, pinned: Mapping[str, Any]) -> None:
    now = all_versions(info)
    versions = {name: pinned[name] for name in VERSIONS if name in pinned}
    same_size = info["size"] is None or info["size"] == pinned["bytes"]
    if same_size and versions and not now.keys() & versions.keys():
        raise StageError(
            f"{path.redacted_url} cannot be proved to be unchanged since this run was planned: "
            f"the server reported its {' and '.join(versions)} then, and does not now.\n"
            "  Run again; what has not changed is reused."
        )
    if not same_size or any(now.get(name, versions[name]) != versions[name] for name in versions):
        raise StageError(
            f"{path.redacted_url} has changed since this run was planned: it had "
            f"{pinned['bytes']} bytes and has {info['size']}.\n"
            "  Run again; what has not changed is reused."
        )


def _download_to_spool(path: RemotePath, info: Info, max_bytes: int | None) -> BinaryIO:
    # The version after the download must be the one before. If the server reports none, the file is
    # downloaded again, and both must have the same digest.
    with ExitStack() as stack:
        spool = stack.enter_context(tempfile.TemporaryFile())
        try:
            digest = _fetch_whole(path, info, spool, max_bytes)
            is_same = bool(all_versions(info)) or digest == _fetch_whole(
                path, {**info, "size": spool.tell()}, None, None
            )
        except StorageError as fault:
            raise to_run_error(fault, path.url, "read") from None
        if not is_same:
            fault = StorageError("exists", ChangedError("two downloads differ"))
            raise to_run_error(fault, path.url, "read")
        spool.seek(0)
        stack.pop_all()  # the caller closes it
    return cast(BinaryIO, spool)


def _fetch_whole(
    path: RemotePath, info: Info, spool: IO[bytes] | None, max_bytes: int | None
) -> bytes:
    """Write the file to `spool`, if it is not None; return its SHA-256."""

    def fetch() -> bytes:
        digest, length, next_check = hashlib.sha256(), 0, 0
        if spool:
            spool.seek(0)
            spool.truncate()

        def write(chunk: bytes) -> None:
            nonlocal length, next_check
            digest.update(chunk)
            length += len(chunk)
            if max_bytes is not None and length > max_bytes:
                raise AnswerError(f"it has more than {max_bytes:,} bytes")
            if info["size"] is not None and length > info["size"]:
                raise ChangedError(f"it had {info['size']} bytes and more arrived")
            if not spool:
                return
            spool.write(chunk)
            if info["size"] is None and length >= next_check:
                disk, next_check = os.fstatvfs(spool.fileno()), length + 16 * CHUNK
                if disk.f_bavail * disk.f_frsize < MIN_FREE_BYTES:
                    raise AnswerError(
                        f"the server does not say how long it is, and after {length:,} bytes less "
                        f"than {MIN_FREE_BYTES:,} are free in {tempfile.gettempdir()}; download "
                        "it, or set TMPDIR to a folder with more room"
                    )

        if path.is_web:
            path.web_file.read_whole(info, write)
            now = path.web_file.info()
        else:
            with path.system.open(path.path, "rb") as stream:
                while chunk := stream.read(CHUNK):
                    write(chunk)
            path.system.invalidate_cache()
            now = path.system.info(path.path)
        require_same(now, info)
        if info["size"] not in (None, length):
            raise ChangedError(f"it had {info['size']} bytes and {length} arrived")
        return digest.digest()

    return retry_until_connected(fetch)
