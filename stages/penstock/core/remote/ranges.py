"""Ranges of one version of a remote file. Every answer is proved to be of that version.

No method of s3fs, gcsfs or adlfs that reads a range takes a condition, so the requests to object
stores are made here, through the sessions of their libraries. Objects are replaced atomically: an
answer that met its condition is of one version.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from importlib import import_module
from typing import Any

from penstock.core.remote import answers
from penstock.core.remote.answers import AnswerError, ChangedError
from penstock.core.remote.path import READ_SECONDS, RemotePath, client_timeout
from penstock.core.remote.version import all_versions

Write = Callable[[bytes], object]


class Ranges(ABC):
    """Reads ranges of a file in the version that `info` describes."""

    def __init__(self, path: RemotePath, info: Mapping[str, Any]) -> None:
        self._remote, self._system, self._path, self._info = path, path.system, path.path, info

    @abstractmethod
    def read(self, start: int, stop: int, write: Write) -> None:
        """Pass bytes `start` to `stop` to `write` as they arrive. Raises ChangedError for another
        version, AnswerError for other bytes, and the errors of the store's library."""

    @abstractmethod
    def verify(self) -> None:
        """Raise ChangedError if what has been read may be of several versions."""


def open_ranges(path: RemotePath, info: Mapping[str, Any]) -> Ranges:
    """The ranges of the file in the version that `info` describes."""
    # The methods that begin with `_` are not public, so a release may lack them.
    match path.store:
        case _ if path.is_web:
            return _WebRanges(path, info)
        case "s3" if info.get("ETag") and hasattr(path.system, "_call_s3"):
            return _S3Ranges(path, info)
        # Zonal buckets are read by another protocol, and appended to within a generation.
        case "gcs" if info.get("generation") and info.get("storageClass") != "RAPID":
            names = ("_set_session", "_get_params", "_get_headers")
            if all(hasattr(path.system, name) for name in names):
                return _GoogleRanges(path, info)
        case "azure" if info.get("etag") and hasattr(path.system, "service_client"):
            return _AzureRanges(path, info)
        case _:
            pass
    return _ComparedRanges(path, info)


class _WebRanges(Ranges):
    def read(self, start: int, stop: int, write: Write) -> None:
        self._remote.web_file.read_range(start, stop, self._info, write)

    def verify(self) -> None:
        # A file that is written in place may change within an answer.
        require_same(self._remote.web_file.info(), self._info)


class _ComparedRanges(Ranges):
    """Ranges by fsspec, with the version compared after each: stores without conditions."""

    def read(self, start: int, stop: int, write: Write) -> None:
        block: bytes = self._system.cat_file(self._path, start=start, end=stop)
        # Before the bytes are passed on: what is written cannot be taken back.
        self.verify()
        answers.write_block(block, stop - start, write)

    def verify(self) -> None:
        require_same(self._remote.info(tries=1) or {}, self._info)


class _ConditionalRanges(Ranges):
    def read(self, start: int, stop: int, write: Write) -> None:
        call: Callable[[], Awaitable[None]] = partial(self._read, start, stop, write)
        import_module("fsspec.asyn").sync(self._system.loop, call)

    def verify(self) -> None:
        pass  # Every answer is of the version.

    @abstractmethod
    async def _read(self, start: int, stop: int, write: Write) -> None: ...

    def _require_version(self, name: str, now: str | None, expected: str) -> None:
        if not now:
            raise AnswerError(f"the store does not report the {name} of what it sends")
        if now != expected:
            raise ChangedError(f"its {name} was {expected} and is {now}")


class _S3Ranges(_ConditionalRanges):
    """Amazon S3 and compatible stores: `If-Match` with the entity tag."""

    async def _read(self, start: int, stop: int, write: Write) -> None:
        tag = self._info["ETag"]
        bucket, key, _ = self._system.split_path(self._path)
        range_ = f"bytes={start}-{stop - 1}"
        answer = await self._system._call_s3(
            "get_object", Bucket=bucket, Key=key, Range=range_, IfMatch=tag
        )
        body = answer["Body"]
        try:
            self._require_version("ETag", answer.get("ETag"), tag)
            answers.require_range(answer.get("ContentRange"), start, stop, self._info["size"])
            await answers.receive(body.iter_chunks(1 << 16), write, stop - start)
        finally:
            body.close()


class _GoogleRanges(_ConditionalRanges):
    """Google Cloud Storage: `ifGenerationMatch`. An object gets another generation whenever its
    content is written, and only then."""

    async def _read(self, start: int, stop: int, write: Write) -> None:
        generation, system = str(self._info["generation"]), self._system
        # Google decompresses what is stored with an encoding, unless the encoding is accepted: the
        # ranges of an object are those of the bytes that are stored.
        encoding = self._info.get("contentEncoding") or "identity"
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": encoding}
        session = await system._set_session()
        async with session.get(
            system.url(self._path),
            params=system._get_params({"ifGenerationMatch": generation}),
            headers=system._get_headers(headers),
            timeout=client_timeout(),
            auto_decompress=False,
        ) as answer:
            if answer.status == HTTPStatus.NOT_FOUND:
                raise FileNotFoundError(self._path)
            if answer.status == HTTPStatus.PRECONDITION_FAILED:
                raise ChangedError(f"it no longer has the generation {generation}")
            answer.raise_for_status()
            now, content_range = map(answer.headers.get, ("X-Goog-Generation", "Content-Range"))
            self._require_version("generation", now, generation)
            answers.require_range(content_range, start, stop, self._info["size"])
            await answers.receive(answer.content.iter_any(), write, stop - start)


class _AzureRanges(_ConditionalRanges):
    """Azure Blob Storage: `If-Match` with the entity tag."""

    async def _read(self, start: int, stop: int, write: Write) -> None:
        tag = '"' + self._info["etag"].strip('"') + '"'  # listings have it without quotes
        container, name, version = self._system.split_path(self._path)
        headers: dict[str, str | None] = {}

        def note_headers(response: Any) -> None:
            # What the library reports of a range is made of the request and not of the answer.
            answered = response.http_response.headers
            headers.update({key: answered.get(key) for key in ("ETag", "Content-Range")})

        # By default the library decompresses what is stored with an encoding.
        encoding = getattr(self._info.get("content_settings"), "content_encoding", None)
        options = {} if encoding in (None, "", "identity") else {"decompress": False}
        async with self._system.service_client.get_blob_client(container, name) as client:
            download = await client.download_blob(
                offset=start,
                length=stop - start,
                version_id=version,
                etag=tag,
                match_condition=import_module("azure.core").MatchConditions.IfNotModified,
                max_concurrency=1,
                read_timeout=READ_SECONDS,
                retry_total=0,  # its first pause is of 15 seconds; the caller retries
                raw_response_hook=note_headers,
                **options,
            )
            block: bytes = await download.readall()
        self._require_version("etag", headers.get("ETag"), tag)
        answers.require_range(headers.get("Content-Range"), start, stop, self._info["size"])
        answers.write_block(block, stop - start, write)


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
