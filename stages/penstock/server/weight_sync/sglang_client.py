"""One inference server, over HTTP: what SGLang calls its weight updates. No torch.

Requests go to the endpoint's own host and port: no redirect is followed, no proxy is asked. Each
has a time in which it is answered.
"""

import http.client
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from penstock.server.protocol.types import Endpoint, Secret
from penstock.server.weight_sync.errors import Step, SyncError, named, refused

LOG = logging.getLogger(__name__)

ALIVE = ("/model_info", "/v1/models", "/health")
"""Any of them that answers says that the server is up; the first that do are asked."""

SIZES = ("/server_info", "/get_server_info")
"""Where it says how it is laid out: the second is what older ones call it."""

MAX_ANSWER = 4 << 20
"""Bytes of an answer that are read."""
MAX_MESSAGE = 500
"""Characters of one that are in the log. No client is told any: it may have named a server that
answers others than itself."""

UNANSWERED = (OSError, http.client.HTTPException, UnicodeError)
"""What a request ends with that is not answered; the last is of a host that is no name at all."""

SHUT_OUT = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
ABSENT = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)


@dataclass(frozen=True)
class Limits:
    """Seconds until something is given up."""

    health: float = 5.0
    group: float = 120.0
    """Until all have joined."""
    pause: float = 60.0
    pauses: int = 3
    """How often pausing is tried."""
    flushes: int = 10
    """How often flushing is: requests that were aborted may not have ended yet."""
    update: float = 300.0
    """Of one bucket."""
    tensor: float = 60.0
    """Of one tensor over gloo, which cannot be broken off: for so long after a fault others may
    still wait for it."""
    word: float = 2.0
    """In which a server may still say why a connection broke, or come late to a group."""
    recovery: float = 10.0
    """That a fault is kept back while servers are told to generate again; they may take longer."""
    late: float = 120.0
    """Until a server that is told so has answered."""


class RefusedError(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


@dataclass(frozen=True)
class EngineParallelism:
    """How a server says that it is laid out. Of its ranks, those of tensor parallelism receive:
    they are numbered by it alone."""

    tensor: int
    pipeline: int = 1
    data: int = 1
    shares_attention: bool = False
    """Whether replicas are of attention alone, within the ranks of tensor parallelism."""

    def fault(self, world_size: int) -> str | None:
        """Why weights cannot be sent to it as a server of so many ranks; None: they can."""
        if self.pipeline > 1:
            return (
                f"it has a pp_size of {self.pipeline}, and weights can be sent to none of more"
                " than 1.\n  Start it with --tp-size alone."
            )
        if self.data > 1 and not self.shares_attention:
            return (
                f"it has a dp_size of {self.data}, and takes weights only as one replica, or with"
                " --enable-dp-attention.\n  Start one server for each replica, and add them all."
            )
        if self.tensor != world_size:
            return (
                f"it says that its tp_size is {self.tensor}, and it was added with a world_size of"
                f" {world_size}.\n  Add it again, with a world_size of {self.tensor} or none."
            )
        return None


@dataclass(frozen=True)
class InferenceServer:
    """One endpoint that is sent weights. Methods raise SyncError, which names it and the step."""

    endpoint: Endpoint
    key: Secret | None = None
    """What it asks of its clients."""

    def require_alive(self, seconds: float) -> None:
        """Raises SyncError unless it says that it is up."""
        faults: list[str] = []
        for path in ALIVE:
            try:
                self._asked("GET", path, None, seconds)
            except (*UNANSWERED, RefusedError) as error:
                faults.append(f"{path}: {_told(error)}")
                continue
            return
        fault = f"it does not answer ({'; '.join(faults)})"
        raise SyncError(fault, step="health", endpoint=self.endpoint)

    def require_size(self, seconds: float) -> None:
        """Raises SyncError where it says that it is laid out otherwise than it was added."""
        sizes = self.sizes(seconds)
        fault = sizes.fault(self.endpoint.world_size) if sizes else None
        if fault is not None:
            raise refused(fault, self.endpoint)

    def sizes(self, seconds: float) -> EngineParallelism | None:
        """How it says that it is laid out; None where it says nothing of it, or does not answer.

        Raises SyncError where it asks for a key and there is none. A key that is not taken here may
        be the one for weights: a server may ask for two.
        """
        for path in SIZES:
            try:
                found = _sizes_in(self._asked("GET", path, None, seconds))
            except RefusedError as error:
                if error.status in SHUT_OUT and self.key is None:
                    raise self._unsaid("health", path, error) from error
                continue
            except UNANSWERED:
                return None
            if found is not None:
                return found
        return None

    def post(
        self, path: str, body: Mapping[str, Any], *, step: Step, seconds: float, tries: int = 1
    ) -> None:
        """Raises SyncError unless it says that it did it."""
        for left in reversed(range(tries)):
            try:
                self._asked("POST", path, body, seconds)
            except (*UNANSWERED, RefusedError) as error:
                # One that is silent is not one that says "not yet".
                if not left or is_absent(error) or isinstance(error, TimeoutError):
                    raise self._unsaid(step, path, error) from error
                time.sleep(0.2)
            else:
                return

    def _asked(self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float) -> Any:
        """What it answers, as JSON; None for anything else."""
        connection = http.client.HTTPConnection(
            self.endpoint.host, self.endpoint.port, timeout=seconds
        )
        headers = {"Authorization": f"Bearer {self.key.text}"} if self.key else {}
        text = None
        if body is not None:
            text, headers["Content-Type"] = json.dumps(body), "application/json"
        try:
            connection.request(method, path, text, headers)
            with connection.getresponse() as answer:
                said = answer.read(MAX_ANSWER)
        finally:
            connection.close()
        read = _read(said)
        if answer.status != HTTPStatus.OK:
            self._log(path, said, read)
            raise RefusedError(answer.status, f"HTTP {answer.status}")
        if isinstance(read, dict) and read.get("success") is False:
            self._log(path, said, read)
            raise RefusedError(
                answer.status, "it says that it has failed; the server's log has why"
            )
        return read

    def _log(self, path: str, said: bytes, read: Any) -> None:
        """For whoever runs the server."""
        LOG.warning("%s%s: %r", named(self.endpoint), path, self._message_of(said, read))

    def _message_of(self, said: bytes, read: Any) -> str:
        told = read.get("message") if isinstance(read, dict) else None
        text = told if isinstance(told, str) else said.decode(errors="replace")
        if self.key:
            text = text.replace(self.key.text, "...")
        return text[:MAX_MESSAGE]

    def _unsaid(self, step: Step, path: str, error: Exception) -> SyncError:
        """Of a request that was not answered as it is to be."""
        fault = f"{path}: {_told(error)}"
        if not isinstance(error, RefusedError) or error.status not in SHUT_OUT:
            return SyncError(fault, step=step, endpoint=self.endpoint)
        return SyncError(
            f"{fault}.\n  Add it with the api_key that it was started with, and of two with the"
            " admin's.",
            step=step,
            endpoint=self.endpoint,
            category="user",
            code="invalid",
        )


def words_to_go_on(group_name: str) -> tuple[tuple[Step, str, dict[str, Any]], ...]:
    """What a server is told after a sync that failed: to generate again, and to leave the group."""
    return (
        ("continue", "/continue_generation", {}),
        ("destroy", "/destroy_weights_update_group", {"group_name": group_name}),
    )


def is_absent(error: BaseException | None) -> bool:
    """Whether there is no such route."""
    return isinstance(error, RefusedError) and error.status in ABSENT


def _read(said: bytes) -> Any:
    try:
        return json.loads(said)
    except (ValueError, RecursionError):
        return None


def _sizes_in(read: Any) -> EngineParallelism | None:
    """Nothing else of it is kept: servers tell their own keys there."""
    if not isinstance(read, dict):
        return None
    sizes = [read.get(name, 1) for name in ("tp_size", "pp_size", "dp_size")]
    if "tp_size" not in read or not all(type(size) is int and size > 0 for size in sizes):
        return None
    return EngineParallelism(*sizes, shares_attention=read.get("enable_dp_attention") is True)


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__
