"""Conditional range requests to object stores, through the sessions of their libraries.

No method of s3fs, gcsfs or adlfs that reads a range takes a condition, so the requests are made
here. Objects are replaced atomically: an answer that met its condition is of one version.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from importlib import import_module
from typing import Any

from penstock.core.remote import answers
from penstock.core.remote.answers import AnswerError, ChangedError, StalledError
from penstock.core.remote.path import RemotePath

Write = Callable[[bytes], object]

CONNECT_SECONDS, READ_SECONDS = 10.0, 60.0
"""Seconds that a connection may take, and that a socket may be silent."""


class _StoreRanges:
    """Ranges of the object in the version that `info` describes."""

    def __init__(self, path: RemotePath, info: Mapping[str, Any]) -> None:
        self._system, self._path, self._info = path.system, path.path, info

    def read(self, start: int, stop: int, write: Write) -> None:
        call: Callable[[], Awaitable[None]] = partial(self._read, start, stop, write)
        import_module("fsspec.asyn").sync(self._system.loop, call)

    def verify(self) -> None:
        """Every answer is of the version."""

    async def _read(self, start: int, stop: int, write: Write) -> None:
        raise NotImplementedError


def _require_version(name: str, wanted: str, now: str | None) -> None:
    if not now:
        raise AnswerError(f"the store does not report the {name} of what it sends")
    if now != wanted:
        raise ChangedError(f"its {name} was {wanted} and is {now}")


class S3Ranges(_StoreRanges):
    """Amazon S3 and compatible stores: `If-Match` with the entity tag."""

    async def _read(self, start: int, stop: int, write: Write) -> None:
        tag = self._info["ETag"]
        bucket, key, _ = self._system.split_path(self._path)
        answer = await self._system._call_s3(
            "get_object",
            Bucket=bucket,
            Key=key,
            Range=f"bytes={start}-{stop - 1}",
            IfMatch=tag,
        )
        body = answer["Body"]
        try:
            _require_version("ETag", tag, answer.get("ETag"))
            answers.require_range(answer.get("ContentRange"), start, stop, self._info["size"])
            received = await answers.receive(body.iter_chunks(1 << 16), write, stop - start)
        finally:
            body.close()
        if received != stop - start:
            raise StalledError(f"{received} of {stop - start} bytes arrived")


class GoogleRanges(_StoreRanges):
    """Google Cloud Storage: `ifGenerationMatch`. An object gets another generation whenever its
    content is written, and only then."""

    async def _read(self, start: int, stop: int, write: Write) -> None:
        generation, system = str(self._info["generation"]), self._system
        # Google decompresses what is stored with an encoding, unless the encoding is accepted: the
        # ranges of an object are those of the bytes that are stored.
        encoding = self._info.get("contentEncoding") or "identity"
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": encoding}
        session = await system._set_session()
        limits = import_module("aiohttp").ClientTimeout(
            total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS
        )
        async with session.get(
            system.url(self._path),
            params=system._get_params({"ifGenerationMatch": generation}),
            headers=system._get_headers(headers),
            timeout=limits,
            auto_decompress=False,
        ) as answer:
            if answer.status == HTTPStatus.NOT_FOUND:
                raise FileNotFoundError(self._path)
            if answer.status == HTTPStatus.PRECONDITION_FAILED:
                raise ChangedError(f"it no longer has the generation {generation}")
            answer.raise_for_status()
            _require_version("generation", generation, answer.headers.get("X-Goog-Generation"))
            content_range = answer.headers.get("Content-Range")
            answers.require_range(content_range, start, stop, self._info["size"])
            received = await answers.receive(answer.content.iter_any(), write, stop - start)
        if received != stop - start:
            raise StalledError(f"{received} of {stop - start} bytes arrived")


class AzureRanges(_StoreRanges):
    """Azure Blob Storage: `If-Match` with the entity tag."""

    async def _read(self, start: int, stop: int, write: Write) -> None:
        tag = '"' + self._info["etag"].strip('"') + '"'  # listings have it without quotes
        container, name, version = self._system.split_path(self._path)
        seen: dict[str, str | None] = {}

        def note(response: Any) -> None:
            # What the library reports of a range is made of the request and not of the answer.
            headers = response.http_response.headers
            seen.update({key: headers.get(key) for key in ("ETag", "Content-Range")})

        # By default the library decompresses what is stored with an encoding.
        encoded = _content_encoding(self._info) not in (None, "", "identity")
        options = {"decompress": False} if encoded else {}
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
                raw_response_hook=note,
                **options,
            )
            block: bytes = await download.readall()
        _require_version("etag", tag, seen.get("ETag"))
        answers.require_range(seen.get("Content-Range"), start, stop, self._info["size"])
        if len(block) > stop - start:
            raise AnswerError(f"{len(block)} bytes arrived where {stop - start} were requested")
        write(block)
        if len(block) < stop - start:
            raise StalledError(f"{len(block)} of {stop - start} bytes arrived")


def conditional_ranges(path: RemotePath, info: Mapping[str, Any]) -> _StoreRanges | None:
    """Ranges of an object with a condition on each, or None if the store or this release of its
    library has none."""
    # The methods that begin with `_` are not public, so a release may lack them.
    match path.store:
        case "s3" if info.get("ETag") and hasattr(path.system, "_call_s3"):
            return S3Ranges(path, info)
        case "gcs" if info.get("generation") and _has_google_session(path.system, info):
            return GoogleRanges(path, info)
        case "azure" if info.get("etag") and hasattr(path.system, "service_client"):
            return AzureRanges(path, info)
        case _:
            return None


def _has_google_session(system: Any, info: Mapping[str, Any]) -> bool:
    # Objects of zonal buckets are read by another protocol, and appended to within a generation.
    is_zonal = info.get("storageClass") == "RAPID"
    names = ("_set_session", "_get_params", "_get_headers")
    return not is_zonal and all(hasattr(system, name) for name in names)


def _content_encoding(info: Mapping[str, Any]) -> str | None:
    return getattr(info.get("content_settings"), "content_encoding", None)
