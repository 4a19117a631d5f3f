"""Ranges of one version of a remote file. Every answer is proved to be of that version."""

from collections.abc import Mapping
from typing import Any, Protocol

from penstock.core.remote.answers import AnswerError, ChangedError, StalledError
from penstock.core.remote.path import RemotePath
from penstock.core.remote.store_ranges import Write, conditional_ranges
from penstock.core.remote.version import all_versions


class Ranges(Protocol):
    """Reads ranges of a file."""

    def read(self, start: int, stop: int, write: Write) -> None:
        """Pass bytes `start` to `stop` to `write` as they arrive. Raises ChangedError for another
        version, AnswerError for other bytes, and the errors of the store's library."""
        ...

    def verify(self) -> None:
        """Raise ChangedError if what has been read may be of several versions."""
        ...


def open_ranges(path: RemotePath, info: Mapping[str, Any]) -> Ranges:
    """The ranges of the file in the version that `info` describes."""
    if path.is_web:
        return _WebRanges(path, info)
    return conditional_ranges(path, info) or _ComparedRanges(path, info)


class _WebRanges:
    """Conditional range requests. A file that is written in place may change within an answer, so
    the version is compared again after the last one."""

    def __init__(self, path: RemotePath, info: Mapping[str, Any]) -> None:
        self._web, self._info = path.web_file, info

    def read(self, start: int, stop: int, write: Write) -> None:
        self._web.read_range(start, stop, self._info, write)

    def verify(self) -> None:
        require_same(self._web.info(), self._info)


class _ComparedRanges:
    """Ranges by fsspec, with the version compared after each: stores without conditions."""

    def __init__(self, path: RemotePath, info: Mapping[str, Any]) -> None:
        self._path, self._info = path, info

    def read(self, start: int, stop: int, write: Write) -> None:
        block: bytes = self._path.system.cat_file(self._path.path, start=start, end=stop)
        # Before the bytes are passed on: what is written cannot be taken back.
        self.verify()
        if len(block) > stop - start:
            raise AnswerError(f"{len(block)} bytes arrived where {stop - start} were requested")
        write(block)
        if len(block) < stop - start:
            raise StalledError(f"{len(block)} of {stop - start} bytes arrived")

    def verify(self) -> None:
        now = self._path.info(tries=1)
        require_same(now or {}, self._info)


def require_same(now: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Raise ChangedError unless size and version are the same."""
    # A digest is not reported in every kind of answer of some servers.
    versions, previous = all_versions(now), all_versions(before)
    common = versions.keys() & previous.keys()
    if previous and not common:
        raise ChangedError("the server no longer reports its version")
    for name in common:
        if versions[name] != previous[name]:
            raise ChangedError(f"its {name} was {previous[name]} and is {versions[name]}")
    if None not in (now.get("size"), before["size"]) and now.get("size") != before["size"]:
        raise ChangedError(f"it had {before['size']} bytes and has {now.get('size')}")
