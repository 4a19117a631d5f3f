"""Open local or remote files for reading."""

import io
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from penstock.core.errors import StageError
from penstock.core.process.retry import retry_until_connected
from penstock.core.remote.errors import StorageError, to_run_error
from penstock.core.remote.path import Info, RemotePath
from penstock.core.remote.stream import RemoteStream
from penstock.core.remote.urls import is_url, local_path
from penstock.core.remote.version import content_version

BUFFER = 256 << 10
"""Buffer size of line readers in bytes."""

CHUNK = 1 << 20


def open_file(location: Path | str, pinned: Mapping[str, Any] | None = None) -> BinaryIO:
    """Open a local path or URL as a seekable read-only binary stream.

    `pinned` is the file's entry in its source pin; the stream is rejected if the remote content has
    changed. Lost connections are resumed at the current offset. Raises StageError for read errors,
    CapabilityError if access is denied.
    """
    if isinstance(location, Path) or not is_url(location):
        return Path(local_path(str(location))).open("rb")
    place = RemotePath.from_url(location)
    info = place.info()
    if info is None:
        raise StageError(
            f"{place.redacted_url} no longer exists; it did when this run was planned.\n"
            "  Restore it, or run again to plan without it."
        )
    if pinned is not None:
        _require_unchanged(place, info, pinned)
    size = info["size"]
    if size is None or (place.is_web and not _supports_ranges(place, size)):
        return _download_to_spool(place)
    return cast(BinaryIO, io.BufferedReader(RemoteStream(place, size), BUFFER))


def _supports_ranges(place: RemotePath, size: int) -> bool:
    """Whether a web server supports range requests."""
    if size < 2:
        return True

    def last_byte() -> bool:
        with place.system.open(place.path, "rb", block_size=1, cache_type="none") as stream:
            stream.seek(size - 1)
            return len(stream.read(1)) == 1

    try:
        return retry_until_connected(last_byte)
    except StorageError as fault:
        if isinstance(fault.error, ValueError):
            return False
        raise to_run_error(fault, place.url, "read") from None


def _require_unchanged(place: RemotePath, info: Info, pinned: Mapping[str, Any]) -> None:
    now = content_version(info) or {}
    known = {name: pinned[name] for name in now if name in pinned}
    same_size = info["size"] is None or info["size"] == pinned["bytes"]
    if not same_size or any(now[name] != known[name] for name in known):
        raise StageError(
            f"{place.redacted_url} has changed since this run was planned: it had "
            f"{pinned['bytes']} bytes and has {info['size']}.\n"
            "  Run again; what has not changed is reused."
        )


def _download_to_spool(place: RemotePath) -> BinaryIO:
    """Download the whole file to a temporary file, for servers without range requests."""
    spool = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it

    def fetch() -> None:
        spool.seek(0)
        spool.truncate()
        with place.system.open(place.path, "rb", block_size=0) as stream:
            shutil.copyfileobj(stream, spool, CHUNK)

    try:
        retry_until_connected(fetch)
    except StorageError as fault:
        spool.close()
        raise to_run_error(fault, place.url, "read") from None
    spool.seek(0)
    return cast(BinaryIO, spool)
