"""Remote paths on top of fsspec: one file, or a folder of files, in any supported store.

A store's library is imported when its first path is opened. Every call retries lost connections and
raises only this project's errors.
"""

import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.core import env
from penstock.core.errors import ArtifactError, StageError
from penstock.core.files import is_relative_name
from penstock.core.process.retry import PLANNING_TRIES, RUN_TRIES, retry_until_connected
from penstock.core.remote import azure_store
from penstock.core.remote.errors import (
    Doing,
    StorageError,
    access_denied_error,
    missing_package_error,
    to_planning_error,
    to_run_error,
)
from penstock.core.remote.urls import PACKAGE_OF, WEB, redact, url_join, url_scheme

if TYPE_CHECKING:
    from penstock.core.remote.web import WebFile

Info = Mapping[str, Any]
"""File metadata of a store: `size` in bytes, and version fields whose names depend on the store."""

Answer = TypeVar("Answer")

CONNECT_SECONDS, READ_SECONDS = 10, 60
"""Seconds that a connection may take, and that a socket may be silent."""

S3_PART = 16 << 20  # Part size of a multipart upload in bytes; four parts are sent concurrently

_PARTS: Mapping[str, Mapping[str, int]] = {
    "s3": {"chunksize": S3_PART, "max_concurrency": 4},
    "azure": {"max_concurrency": 4},
}

S3_TRIES = 3  # Tries of s3fs per part, before the whole call is retried here


@dataclass(frozen=True)
class RemotePath:
    """A remote file or folder. `system` is the fsspec file system, `path` its path."""

    url: str
    system: Any = field(repr=False, compare=False)
    path: str = field(repr=False)
    is_trusted: bool = field(default=True, compare=False)
    """Whether a user wrote the URL. One that comes from data leads to public addresses only."""

    @classmethod
    def from_url(cls, url: str, *, is_trusted: bool = True) -> "RemotePath":
        """The path of that URL, without any request. Raises ConfigError for an unknown scheme,
        CapabilityError if its package is not installed."""
        scheme = url_scheme(url)
        try:
            url_to_fs: Any = import_module("fsspec.core").url_to_fs
            system, path = retry_until_connected(
                lambda: url_to_fs(url, **_options(scheme)), tries=1
            )
        except StorageError as fault:
            if isinstance(fault.error, ImportError):
                raise missing_package_error(url) from None
            if PACKAGE_OF[scheme]:
                # No request was made: the library lacks an account or credentials.
                raise access_denied_error(url, fault.error, "read") from None
            raise to_planning_error(fault, url) from None
        if PACKAGE_OF[scheme] == "s3":
            system.retries = S3_TRIES
        elif PACKAGE_OF[scheme] == "azure":
            azure_store.shorten_retries(system)
        return cls(url, system, str(path).rstrip("/"), is_trusted)

    @property
    def redacted_url(self) -> str:
        return redact(self.url)

    @property
    def web_file(self) -> "WebFile":
        from penstock.core.remote.web import WebFile  # imports asyncio and TLS

        return WebFile(self.url, self.system, is_trusted=self.is_trusted)

    @property
    def store(self) -> str | None:
        """The kind of object store: `s3`, `gcs`, `azure`, or None."""
        return PACKAGE_OF[url_scheme(self.url)]

    @property
    def is_web(self) -> bool:
        """Whether it is a single file on a web server."""
        return url_scheme(self.url) in WEB

    def __truediv__(self, name: str) -> "RemotePath":
        """Join a name to this folder. Raises ArtifactError for a name that escapes the folder."""
        url, path = url_join(self.url, require_relative(name)), posixpath.join(self.path, name)
        return RemotePath(url, self.system, path, self.is_trusted)

    def info(self, *, tries: int = RUN_TRIES) -> Info | None:
        """The metadata of this file, or None if it does not exist."""

        def request() -> Info:
            return self.web_file.info() if self.is_web else self._unlisted_system().info(self.path)

        info = self._ask(request, tries)
        return info if info and info.get("type") == "file" else None

    def files(self, *, tries: int = RUN_TRIES) -> dict[str, Info]:
        """Every file below this folder by relative name, sorted; empty if there is no folder."""

        def request() -> Mapping[str, Info]:
            entries = self._unlisted_system().find(self.path, detail=True)
            # adlfs answers for a file with a list.
            return entries if hasattr(entries, "items") else {}

        infos = self._ask(request, tries) or {}
        below = self.path + "/"
        return {
            path.removeprefix(below): info
            for path, info in sorted(infos.items())
            # Some tools store an empty object `folder/` in place of a folder.
            if path.startswith(below) and info.get("type") == "file" and not path.endswith("/")
        }

    def names(self) -> set[str]:
        """The names of files and folders directly in this folder."""
        if self.store == "azure":
            # adlfs takes an empty object `folder/` for all that the folder has.
            return {name.partition("/")[0] for name in self.files(tries=PLANNING_TRIES)}

        def request() -> list[str]:
            return [str(path) for path in self._unlisted_system().ls(self.path, detail=False)]

        below = self.path + "/"
        paths = self._ask(request, PLANNING_TRIES) or []
        names = (path.removeprefix(below) for path in paths if path.startswith(below))
        return {name.partition("/")[0] for name in names} - {""}

    def read(self) -> bytes | None:
        """Read a small file, or return None if it does not exist."""
        return self._run("read", lambda: bytes(self.system.cat_file(self.path)), or_absent=True)

    def write(self, content: bytes) -> None:
        """Write a small file atomically, overwriting an existing one."""
        self._run("written", lambda: self.system.pipe_file(self.path, content))

    def create(self, content: bytes) -> bool:
        """Create a small file if it does not exist; of several writers with different contents only
        one gets True."""
        try:
            retry_until_connected(
                lambda: self.system.pipe_file(self.path, content, mode="create"), tries=1
            )
        except StorageError as fault:
            if fault.kind in ("exists", "cut"):
                # The write may have succeeded before a lost answer, and the library's own retry
                # have met its object: the writer that reads back its own content has won.
                return self.read() == content
            raise to_run_error(fault, self.url, "written") from None
        return True

    def put(self, source: Path) -> Info:
        """Upload a local file atomically; return its metadata. Raises StageError on failure."""
        size = source.stat().st_size
        # By default s3fs and adlfs would buffer half a gigabyte for each of several files.
        parts = _PARTS.get(self.store or "", {})
        self._run("written", lambda: self.system.put_file(str(source), self.path, **parts))
        arrived = self.info()
        if arrived is None or arrived["size"] != size:
            have = arrived["size"] if arrived else "no"
            raise StageError(
                f"{self.redacted_url} was uploaded with {size} bytes and has {have} bytes.\n"
                "  Run it again; if the error persists, the store is faulty."
            )
        return arrived

    def delete(self) -> None:
        self._run("deleted", lambda: self.system.rm_file(self.path), or_absent=True)

    def copy(self, target: "RemotePath") -> None:
        def send() -> None:
            self.system.cp_file(self.path, target.path)
            if target.store == "azure":
                azure_store.await_copy(target.system, target.path)

        self._run("copied", send)

    def move(self, target: "RemotePath") -> None:
        self.copy(target)
        self.delete()

    def _unlisted_system(self) -> Any:
        # fsspec keeps listings, which lack what other machines have written since.
        self.system.invalidate_cache()
        return self.system

    def _ask(self, request: Callable[[], Answer], tries: int) -> Answer | None:
        try:
            return retry_until_connected(request, tries=tries)
        except StorageError as fault:
            if fault.kind == "absent":
                return None
            raise to_planning_error(fault, self.url) from None

    def _run(
        self, doing: Doing, act: Callable[[], Answer], *, or_absent: bool = False
    ) -> Answer | None:
        try:
            return retry_until_connected(act)
        except StorageError as fault:
            if or_absent and fault.kind == "absent":
                return None
            raise to_run_error(fault, self.url, doing) from None


def require_relative(name: str) -> str:
    """Return the name if it stays below its folder. Raises ArtifactError otherwise."""
    if not is_relative_name(name):
        raise ArtifactError(
            f"{name!r} is not a relative file name inside its folder.\n"
            "  It may have been written to overwrite other files: check its origin before use."
        )
    return name


def _options(scheme: str) -> dict[str, Any]:
    """fsspec options of a scheme. They never contain credentials."""
    if PACKAGE_OF[scheme] == "s3":
        # s3fs and this module retry; botocore's retries would multiply theirs.
        config = {
            "retries": {"max_attempts": 0},
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
        }
        endpoint = env.s3_endpoint()
        endpoint_options = {"endpoint_url": endpoint} if endpoint else {}
        return {"config_kwargs": config, "use_listings_cache": False, **endpoint_options}
    if scheme in WEB:
        return {
            # Request raw bytes: a compressed response has other offsets.
            "headers": {"Accept-Encoding": "identity"},
            # `trust_env`: proxies and netrc are used.
            "client_kwargs": {"trust_env": True, "timeout": client_timeout()},
        }
    # A listing of another thread, kept by the library, is no answer to what is asked now.
    return {"use_listings_cache": False} if PACKAGE_OF[scheme] else {}


def client_timeout() -> Any:
    """The limits of aiohttp's requests: a large file has no total timeout, only one per read."""
    timeout = import_module("aiohttp").ClientTimeout
    return timeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
