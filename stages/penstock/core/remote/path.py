"""A place behind a URL: one file, or a folder of files, on any store that fsspec speaks to.

The store's library is imported when the first place on it is opened. Every call survives dropped
connections; what it raises is one of this project's errors.
"""

import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from penstock.core import env
from penstock.core.errors import ArtifactError, StageError
from penstock.core.process.retry import PATIENT, QUICK, retry_until_connected
from penstock.core.remote.errors import (
    Doing,
    StorageError,
    package_missing,
    while_planning,
    while_working,
)
from penstock.core.remote.urls import PACKAGE_OF, WEB, redact, url_join, url_scheme

Info = Mapping[str, Any]
"""What a store says of a file: `size` in bytes, and names of its version that differ by store."""

S3_PART = 16 << 20
"""Bytes of a large file that are sent at once, of which four are on their way."""

S3_TRIES = 3
"""How often s3fs asks by itself, part by part, before the whole call is begun again here."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class RemotePath:
    """A file or a folder. `system` is fsspec's, `path` what it calls the place."""

    url: str
    system: Any = field(repr=False, compare=False)
    path: str = field(repr=False)

    @classmethod
    def of(cls, url: str) -> "RemotePath":
        """The place of that URL; nothing is asked of the store yet.

        Raises ConfigError for a scheme that is not known, CapabilityError without its package.
        """
        scheme = url_scheme(url)
        try:
            url_to_fs: Any = import_module("fsspec.core").url_to_fs
            system, path = retry_until_connected(
                lambda: url_to_fs(url, **_options(scheme)), tries=1
            )
        except StorageError as fault:
            if isinstance(fault.error, ImportError):
                raise package_missing(url) from None
            raise while_planning(fault, url) from None
        place = cls(url, system, str(path).rstrip("/"))
        if place._is_s3:
            system.retries = S3_TRIES
        return place

    @property
    def said(self) -> str:
        """The URL without anything secret."""
        return redact(self.url)

    @property
    def _is_s3(self) -> bool:
        return PACKAGE_OF[url_scheme(self.url)] == "s3"

    @property
    def is_web(self) -> bool:
        """Whether it is a single file on a web server."""
        return url_scheme(self.url) in WEB

    def __truediv__(self, name: str) -> "RemotePath":
        """Something below this folder. Raises ArtifactError for a name that leads out of it."""
        return RemotePath(
            url_join(self.url, checked(name)), self.system, posixpath.join(self.path, name)
        )

    def info(self, *, tries: int = PATIENT) -> Info | None:
        """What the store says of this file, or None where there is none."""
        try:
            found: Any = retry_until_connected(lambda: self._ask("info"), tries=tries)
        except StorageError as fault:
            if fault.kind == "absent":
                return None
            raise while_planning(fault, self.url) from None
        return found if found.get("type") == "file" else None

    def files(self, *, tries: int = PATIENT) -> dict[str, Info]:
        """Every file below this folder by its name there, sorted; none where there is no folder."""
        try:
            found: Any = retry_until_connected(lambda: self._ask("find", detail=True), tries=tries)
        except StorageError as fault:
            if fault.kind == "absent":
                return {}
            raise while_planning(fault, self.url) from None
        below = self.path + "/"
        return {
            path.removeprefix(below): info
            for path, info in sorted(found.items())
            if path.startswith(below) and info.get("type") == "file" and not path.endswith("/")
        }

    def names(self) -> set[str]:
        """The names directly in this folder, files and folders."""
        try:
            found: Any = retry_until_connected(lambda: self._ask("ls", detail=False), tries=QUICK)
        except StorageError as fault:
            if fault.kind == "absent":
                return set()
            raise while_planning(fault, self.url) from None
        return {PurePosixPath(str(path)).name for path in found} - {""}

    def read(self) -> bytes | None:
        """All bytes of a small file, or None where there is none."""
        try:
            return retry_until_connected(lambda: bytes(self.system.cat_file(self.path)))
        except StorageError as fault:
            if fault.kind == "absent":
                return None
            raise while_working(fault, self.url, "read") from None

    def write(self, content: bytes) -> None:
        """Put a small file there in one step, over whatever is there."""
        self._do("written", lambda: self.system.pipe_file(self.path, content))

    def create(self, content: bytes) -> bool:
        """Put a small file there if there is none; of several that try, one is told True."""
        try:
            retry_until_connected(
                lambda: self.system.pipe_file(self.path, content, mode="create"), tries=1
            )
        except StorageError as fault:
            if fault.kind == "exists":
                return False
            if fault.kind == "cut":
                # It may have arrived all the same: whoever finds its own words there has won.
                return self.read() == content
            raise while_working(fault, self.url, "written") from None
        return True

    def put(self, source: Path) -> None:
        """Send a local file; it appears whole or not at all. Raises StageError if it fails."""
        size = source.stat().st_size
        # By itself s3fs would hold half a gigabyte of each of several files.
        parts = {"chunksize": S3_PART, "max_concurrency": 4} if self._is_s3 else {}

        def send() -> None:
            self.system.put_file(str(source), self.path, **parts)

        self._do("written", send)
        arrived = self.info()
        if arrived is None or arrived["size"] != size:
            have = arrived["size"] if arrived else "no"
            raise StageError(
                f"{self.said} was sent with {size} bytes and has {have} bytes.\n"
                "  Run it again; if it happens again, the store is at fault."
            )

    def delete(self) -> None:
        """Remove the file, if it is there."""
        try:
            retry_until_connected(lambda: self.system.rm_file(self.path))
        except StorageError as fault:
            if fault.kind != "absent":
                raise while_working(fault, self.url, "deleted") from None

    def copy(self, target: "RemotePath") -> None:
        """Copy the file within the store."""
        self._do("copied", lambda: self.system.cp_file(self.path, target.path))

    def move(self, target: "RemotePath") -> None:
        """Copy within the store, then remove here."""
        self.copy(target)
        self.delete()

    def _ask(self, method: str, **options: Any) -> Any:
        self.system.invalidate_cache()
        return getattr(self.system, method)(self.path, **options)

    def _do(self, doing: Doing, act: Callable[[], Result]) -> Result:
        try:
            return retry_until_connected(act)
        except StorageError as fault:
            raise while_working(fault, self.url, doing) from None


def checked(name: str) -> str:
    """The name, if it stays below the folder it is joined to. Raises ArtifactError otherwise."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        raise ArtifactError(
            f"{name!r} is no name of a file below a folder.\n"
            "  Whoever wrote it there may be up to no good: look at it before you delete it."
        )
    return name


def _options(scheme: str) -> dict[str, Any]:
    """How fsspec is to open a store of that kind. Credentials are never among it."""
    if PACKAGE_OF[scheme] == "s3":
        # Retrying is s3fs's and ours; botocore would multiply it.
        config = {"retries": {"max_attempts": 0}, "connect_timeout": 10, "read_timeout": 60}
        endpoint = env.s3_endpoint()
        where = {"endpoint_url": endpoint} if endpoint else {}
        return {"config_kwargs": config, "use_listings_cache": False, **where}
    if scheme in WEB:
        # A large file may take its time, as long as something comes. Proxies and netrc count.
        limits = import_module("aiohttp").ClientTimeout(total=None, sock_connect=10, sock_read=60)
        return {
            # Bytes as they lie there: a compressed answer has other offsets.
            "headers": {"Accept-Encoding": "identity"},
            "client_kwargs": {"trust_env": True, "timeout": limits},
        }
    return {}
