"""Requests to web servers through fsspec's sessions, with every answer proved.

Redirects are followed here, so that no server can lead to an address on a private network: only a
URL that a user wrote may be there, and then also what it redirects to.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from email.utils import parsedate_to_datetime
from functools import partial
from http import HTTPStatus
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from penstock.core.remote import addresses, answers
from penstock.core.remote.answers import AnswerError, ChangedError
from penstock.core.remote.urls import WEB, redact, redact_text

RESPONSE_SECONDS = 60.0  # From a request to the end of the headers of its answer

MAX_REDIRECTS = 10

REDIRECTS = (301, 302, 303, 307, 308)

VERSION_HEADERS = ("ETag", "Last-Modified")

RACY_SECONDS = 2
"""A modification time this close to the time of the answer does not tell versions apart."""

_NO_RANGES = (400, 405, 416, 501)  # Answers to a range request by servers that answer a plain one


async def _public_client(**options: Any) -> Any:
    aiohttp = import_module("aiohttp")
    connector = aiohttp.TCPConnector(socket_factory=addresses.public_socket)
    return aiohttp.ClientSession(connector=connector, **options)


class WebFile:
    """A file on a web server. `system` is fsspec's file system for it. Unless `is_trusted`, the URL
    comes from data, and no address but a public one is connected to."""

    def __init__(self, url: str, system: Any, *, is_trusted: bool = True) -> None:
        self._url = url
        self._system = system
        self._is_trusted = is_trusted

    def info(self) -> dict[str, Any]:
        """Size, version and `partial` (whether it can be read in ranges), by a range request: what
        HEAD says need not be so, and signed URLs refuse it."""
        return self._sync(self._info)

    def read_range(
        self, start: int, stop: int, info: Mapping[str, Any], write: Callable[[bytes], object]
    ) -> None:
        self._sync(partial(self._read_range, start, stop, info, write))

    def read_whole(self, info: Mapping[str, Any], write: Callable[[bytes], object]) -> None:
        """Pass the whole file of that version to `write`."""
        self._sync(partial(self._read_whole, info, write))

    def _sync(self, call: Callable[[], Any]) -> Any:
        return import_module("fsspec.asyn").sync(self._system.loop, call)

    async def _info(self) -> dict[str, Any]:
        async with self._get({"Range": "bytes=0-0"}) as answer:
            if answer.status not in _NO_RANGES:
                return self._describe(answer)
            if answers.parse_content_range(answer.headers.get("Content-Range"))[2] == 0:
                return {**self._describe(answer, accept=416), "size": 0}
        async with self._get({}) as answer:
            return {**self._describe(answer), "partial": False}

    def _describe(self, answer: Any, accept: int = 200) -> dict[str, Any]:
        if answer.status != accept:
            self._require_success(answer)
        size, is_partial = None, False
        if answer.status == HTTPStatus.PARTIAL_CONTENT:
            first, stop, size = answers.parse_content_range(answer.headers.get("Content-Range"))
            is_partial = (first, stop) == (0, 1) and size is not None and not _is_encoded(answer)
        elif not _is_encoded(answer) and "Content-Length" in answer.headers:
            size = int(answer.headers["Content-Length"])
        digest = answer.headers.get("Content-MD5") if answer.status == HTTPStatus.OK else None
        return {
            "name": self._url,
            "type": "file",
            "size": size,
            "partial": is_partial,
            **({"Content-MD5": digest} if digest else {}),
            **_version(answer.headers),
        }

    async def _read_range(
        self, start: int, stop: int, info: Mapping[str, Any], write: Callable[[bytes], object]
    ) -> None:
        headers = {"Range": f"bytes={start}-{stop - 1}", **_conditions(info)}
        async with self._get(headers) as answer:
            if answer.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise ChangedError(f"it had {info['size']} bytes and has fewer")
            self._require_success(answer)
            _require_version(answer, info)
            if answer.status != HTTPStatus.PARTIAL_CONTENT:
                raise AnswerError(
                    f"the server was asked for a range and answered {_status(answer)}, as it did "
                    "not before"
                )
            answers.require_range(answer.headers.get("Content-Range"), start, stop, info["size"])
            await answers.receive(answer.content.iter_any(), write, stop - start)

    async def _read_whole(self, info: Mapping[str, Any], write: Callable[[bytes], object]) -> None:
        async with self._get(_conditions(info)) as answer:
            self._require_success(answer)
            if answer.status != HTTPStatus.OK:
                raise AnswerError(
                    f"the server was asked for the file and answered {_status(answer)}"
                )
            _require_version(answer, info)
            is_exact = "Content-Length" in answer.headers and not _is_encoded(answer)
            length = int(answer.headers["Content-Length"]) if is_exact else None
            await answers.receive(answer.content.iter_any(), write, length)

    def _require_success(self, answer: Any) -> None:
        if answer.status == HTTPStatus.NOT_FOUND:
            raise FileNotFoundError(redact(self._url))
        if answer.status < 600:
            answer.raise_for_status()
        if not 200 <= answer.status < 300:
            raise AnswerError(f"the server answers {_status(answer)}, which is no file")

    @asynccontextmanager
    async def _get(self, headers: Mapping[str, str]) -> AsyncGenerator[Any]:
        yarl, aiohttp = import_module("yarl"), import_module("aiohttp")
        target: Any = yarl.URL(self._url)
        request_headers = {**self._system.kwargs.get("headers", {}), **headers}
        for _ in range(MAX_REDIRECTS + 1):
            session = await self._session_for(target)
            try:
                answer = await asyncio.wait_for(
                    session.get(target, headers=request_headers, allow_redirects=False),
                    RESPONSE_SECONDS,
                )
            except aiohttp.ClientResponseError as error:
                # aiohttp gives answers that it cannot parse the status 400.
                reason = str(error.message).strip().split("\n")[0][:160]
                raise AnswerError(f"its answer is not valid HTTP: {reason}") from None
            except aiohttp.ClientConnectorError as error:
                if isinstance(error.os_error, addresses.PrivateAddressError):
                    raise addresses.PrivateAddressError(str(error.os_error)) from None
                raise
            except TimeoutError:
                raise answers.StalledError(
                    f"no complete answer came in {RESPONSE_SECONDS:g} s"
                ) from None
            try:
                if answer.status not in REDIRECTS or "Location" not in answer.headers:
                    yield answer
                    return
                target = _redirect_target(target, answer.headers["Location"])
            finally:
                answer.close()
        raise AnswerError(f"it redirects more than {MAX_REDIRECTS} times")

    async def _session_for(self, target: Any) -> Any:
        """The session for one request: a guarded one for hosts that the user did not name."""
        first, host = urlsplit(self._url).hostname or "", target.host or ""
        if self._is_trusted:
            if host == first:
                return await self._system.set_session()
            # In a thread: getaddrinfo blocks, and fsspec has one event loop for all transfers.
            named = await asyncio.to_thread(addresses.resolve, first)
            if not all(map(addresses.is_public, named)):
                return await self._system.set_session()
        if await asyncio.to_thread(addresses.has_proxy, str(target)):
            # The proxy connects: what its answer comes from can only be checked by name.
            named = await asyncio.to_thread(addresses.resolve, host)
            addresses.require_public(named, host)
            return await self._system.set_session()
        # A proxy of the environment would connect in place of the guarded socket.
        options = {**self._system.client_kwargs, "trust_env": False}
        guarded = import_module("fsspec").filesystem(
            "http", get_client=_public_client, client_kwargs=options
        )
        return await guarded.set_session()


def _redirect_target(url: Any, location: str) -> Any:
    """The URL that a redirect leads to. Raises AnswerError unless it is one of the web."""
    target: Any = None
    with suppress(ValueError):
        target = url.join(import_module("yarl").URL(location))
    if target is None or target.scheme not in WEB or not target.host:
        raise AnswerError(f"it redirects to {redact_text(location)[:160]}, which is no web address")
    return target


def _version(headers: Mapping[str, str]) -> dict[str, str]:
    version = {name: headers[name] for name in VERSION_HEADERS if headers.get(name)}
    if "ETag" not in version and _is_racy(headers):
        return {}
    return version


def _is_racy(headers: Mapping[str, str]) -> bool:
    """Whether the file may change again within the second of its modification time (RFC 9110,
    8.8.2.2)."""
    try:
        age = parsedate_to_datetime(headers["Date"]) - parsedate_to_datetime(
            headers["Last-Modified"]
        )
    except (KeyError, ValueError, TypeError):
        return False
    return age.total_seconds() < RACY_SECONDS


def _conditions(info: Mapping[str, Any]) -> dict[str, str]:
    tag: str = info.get("ETag", "")
    if tag.startswith('"'):  # a weak one never matches
        return {"If-Match": tag}
    date = info.get("Last-Modified")
    return {"If-Unmodified-Since": date} if date else {}


def _require_version(answer: Any, info: Mapping[str, Any]) -> None:
    tag = info.get("ETag")
    for name in VERSION_HEADERS:
        version, now = info.get(name), answer.headers.get(name)
        if name == "Last-Modified" and tag and not tag.startswith("W/"):
            continue
        if version and version != now:
            raise ChangedError(f"its {name} was {version} and is {now or 'not reported'}")


def _is_encoded(answer: Any) -> bool:
    return answer.headers.get("Content-Encoding", "identity") not in ("identity", "")


def _status(answer: Any) -> str:
    return f"{answer.status} {answer.reason or ''}".strip()
