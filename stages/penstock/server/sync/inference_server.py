"""One inference server, over HTTP: what SGLang calls its weight updates.

Requests go to the endpoint's own host and port: no redirect is followed, no proxy is asked. Each
has a time in which it is answered.
"""

import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.server.protocol.values import Endpoint
from penstock.server.sync.errors import Step, SyncError

ALIVE = ("/model_info", "/v1/models", "/health")
"""Any of them that answers says that the server is up; the first that do are asked."""

MAX_ANSWER = 1 << 20
"""Bytes of an answer that are read."""


@dataclass(frozen=True)
class Limits:
    """Seconds until something is given up."""

    health: float = 5.0
    group: float = 120.0
    """Until all have joined."""
    pause: float = 60.0
    pauses: int = 3
    """How often pausing is tried."""
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


@dataclass(frozen=True)
class InferenceServer:
    """One endpoint that is sent weights. Methods raise SyncError, which names it and the step."""

    endpoint: Endpoint

    def require_alive(self, seconds: float) -> None:
        """Raises SyncError unless it says that it is up."""
        faults: list[str] = []
        for path in ALIVE:
            try:
                self._asked("GET", path, None, seconds)
            except (OSError, http.client.HTTPException, RefusedError) as error:
                faults.append(f"{path}: {_told(error)}")
                continue
            return
        raise self._error("health", f"it does not answer ({'; '.join(faults)})")

    def post(
        self, path: str, body: Mapping[str, Any], *, step: Step, seconds: float, tries: int = 1
    ) -> None:
        """Raises SyncError unless it says that it did it."""
        for left in reversed(range(tries)):
            try:
                self._asked("POST", path, body, seconds)
            except (OSError, http.client.HTTPException, RefusedError) as error:
                if not left:
                    raise self._error(step, f"{path}: {_told(error)}") from error
                time.sleep(0.2)
            else:
                return

    def _asked(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float
    ) -> None:
        connection = http.client.HTTPConnection(
            self.endpoint.host, self.endpoint.port, timeout=seconds
        )
        try:
            text = None if body is None else json.dumps(body)
            headers = {"Content-Type": "application/json"} if text else {}
            connection.request(method, path, text, headers)
            answer = connection.getresponse()
            said = answer.read(MAX_ANSWER)
        finally:
            connection.close()
        if answer.status != http.HTTPStatus.OK:
            raise RefusedError(f"HTTP {answer.status}: {_message_of(said)}")
        if _outcome_of(said) is False:
            raise RefusedError(_message_of(said))

    def _error(self, step: Step, fault: str) -> SyncError:
        return SyncError(fault, step=step, endpoint=self.endpoint)


def _read(said: bytes) -> Any:
    try:
        return json.loads(said)
    except ValueError:
        return None


def _outcome_of(said: bytes) -> Any:
    """What it says of its success; None where it says nothing."""
    read = _read(said)
    return read.get("success") if isinstance(read, dict) else None


def _message_of(said: bytes) -> str:
    read = _read(said)
    if isinstance(read, dict) and isinstance(read.get("message"), str):
        return read["message"]
    return said[:200].decode(errors="replace")


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__
