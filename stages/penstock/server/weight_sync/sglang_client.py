"""SGLang HTTP client for weight updates. No torch. Requests go to the endpoint's own host and port,
without redirects or proxies, and have timeouts."""

import http.client
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

from penstock.server.protocol.types import Endpoint, Secret
from penstock.server.weight_sync.errors import Step, SyncError, refused

T = TypeVar("T")

LOG = logging.getLogger(__name__)

HEALTH_ROUTES = ("/model_info", "/v1/models", "/health")
"""Any of these routes shows that the server is up; they are tried in order."""

# Routes that report the parallelism; the second one is its older name.
PARALLELISM_ROUTES = ("/server_info", "/get_server_info")

MAX_RESPONSE_BYTES = 4 << 20
MAX_MESSAGE = 500  # Maximum characters of a response in the log
# Errors of a request without response; the last one is for an invalid host name.
NO_RESPONSE = (OSError, http.client.HTTPException, UnicodeError)

UNAUTHORIZED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
ABSENT = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)


@dataclass(frozen=True)
class Limits:
    """Timeouts in seconds, and tries."""

    health: float = 5.0
    group: float = 120.0  # For all ranks to join the group
    pause: float = 60.0
    pauses: int = 3  # Tries of pausing
    flushes: int = 10  # Tries of flushing: aborted requests may not have ended yet
    update: float = 300.0  # For one bucket
    tensor: float = 60.0
    """Over gloo, which cannot be interrupted: other ranks may wait this long after an error."""
    report: float = 2.0  # For a server to report why a connection broke, or to join a group late
    recovery: float = 10.0  # For servers to resume before an error is raised; they may take longer
    late: float = 120.0  # For the response to a resume request


class HttpStatusError(Exception):
    """An unsuccessful response."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class EngineParallelism:
    """The parallelism that a server reports. Only its tensor parallel ranks receive weights,
    because ranks are numbered by tensor parallelism alone."""

    tensor: int
    pipeline: int = 1
    data: int = 1
    shares_attention: bool = False
    """Whether data parallelism covers attention alone, within the tensor parallel ranks."""

    def fault(self, world_size: int) -> str | None:
        """Why weights cannot be sent to it with this world size; None if they can."""
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
    """An endpoint of weight sync. Methods raise SyncError, which names endpoint and step."""

    endpoint: Endpoint
    key: Secret | None = None  # The server's API key

    def require_alive(self, seconds: float) -> None:
        """Raises SyncError unless it is healthy."""
        errors: list[str] = []
        for path in HEALTH_ROUTES:
            try:
                self._request("GET", path, None, seconds)
            except (*NO_RESPONSE, HttpStatusError) as error:
                errors.append(f"{path}: {_describe_error(error)}")
            else:
                return
        fault = f"it does not answer ({'; '.join(errors)})"
        raise SyncError(fault, step="health", endpoint=self.endpoint)

    def require_size(self, seconds: float) -> None:
        """Raises SyncError if its reported parallelism differs from the registered one."""
        sizes = self.sizes(seconds)
        fault = sizes.fault(self.endpoint.world_size) if sizes else None
        if fault is not None:
            raise refused(fault, self.endpoint)

    def sizes(self, seconds: float) -> EngineParallelism | None:
        """The reported parallelism; None if it reports none or does not respond. Raises SyncError
        if it requires a key and none is set. A key that is rejected here may be valid for weight
        updates: a server may have two keys."""
        for path in PARALLELISM_ROUTES:
            try:
                parallelism = _parse_parallelism(self._request("GET", path, None, seconds))
            except HttpStatusError as error:
                if error.status in UNAUTHORIZED and self.key is None:
                    raise self._to_sync_error("health", path, error) from error
                continue
            except NO_RESPONSE:
                return None
            if parallelism is not None:
                return parallelism
        return None

    def post(
        self, path: str, body: Mapping[str, Any], *, step: Step, seconds: float, tries: int = 1
    ) -> None:
        """Raises SyncError unless the request succeeds."""
        for tries_left in reversed(range(tries)):
            try:
                self._request("POST", path, body, seconds)
            except (*NO_RESPONSE, HttpStatusError) as error:
                # A timeout is not a "not yet" response.
                if not tries_left or is_absent(error) or isinstance(error, TimeoutError):
                    raise self._to_sync_error(step, path, error) from error
                time.sleep(0.2)
            else:
                return

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float
    ) -> Any:
        """The JSON response; None for anything else."""
        connection = http.client.HTTPConnection(
            self.endpoint.host, self.endpoint.port, timeout=seconds
        )
        headers = {"Authorization": f"Bearer {self.key.text}"} if self.key else {}
        text = None
        if body is not None:
            text, headers["Content-Type"] = json.dumps(body), "application/json"
        try:
            connection.request(method, path, text, headers)
            # HTTPConnection follows no redirect and reads no HTTP_PROXY: keys reach no other host.
            with connection.getresponse() as answer:
                # With a size: a response of any server that a client names may have no end.
                body_bytes = answer.read(MAX_RESPONSE_BYTES)
        finally:
            connection.close()
        try:
            parsed = json.loads(body_bytes)
        except (ValueError, RecursionError):
            parsed = None
        fields = parsed if isinstance(parsed, dict) else {}
        if answer.status != HTTPStatus.OK:
            fault = f"HTTP {answer.status}"
        elif fields.get("success") is False:
            fault = "it says that it has failed; the server's log has why"
        else:
            return parsed
        message = fields.get("message")
        text = message if isinstance(message, str) else body_bytes.decode(errors="replace")
        if self.key:
            text = text.replace(self.key.text, "...")
        # Clients never see it, as the endpoint may be a server that reveals something to us alone.
        LOG.warning("%s%s: %r", self.endpoint.address, path, text[:MAX_MESSAGE])
        raise HttpStatusError(answer.status, fault)

    def _to_sync_error(self, step: Step, path: str, error: Exception) -> SyncError:
        fault = f"{path}: {_describe_error(error)}"
        if not isinstance(error, HttpStatusError) or error.status not in UNAUTHORIZED:
            return SyncError(fault, step=step, endpoint=self.endpoint)
        return SyncError(
            f"{fault}.\n  Add it with the api_key that it was started with, and of two with the"
            " admin's.",
            step=step,
            endpoint=self.endpoint,
            code="invalid",
        )


def run_in_background(act: Callable[[], T]) -> Future[T]:
    """Run in a daemon thread, which does not block process exit."""
    future: Future[T] = Future()
    # Mark as running, so that the future cannot be cancelled: the call completes anyway.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # noqa: BLE001 - raised by future.result()
            future.set_exception(error)

    threading.Thread(target=run, name="penstock-sync", daemon=True).start()
    return future


def recovery_requests(group_name: str) -> tuple[tuple[Step, str, dict[str, Any]], ...]:
    """Requests after a failed sync: resume generation, and leave the group."""
    return (
        ("continue", "/continue_generation", {}),
        ("destroy", "/destroy_weights_update_group", {"group_name": group_name}),
    )


def is_absent(error: BaseException | None) -> bool:
    """Whether the route does not exist."""
    return isinstance(error, HttpStatusError) and error.status in ABSENT


def _parse_parallelism(read: Any) -> EngineParallelism | None:
    # Read only these fields: the response contains the server's own keys.
    if not isinstance(read, dict):
        return None
    sizes = [read.get(name, 1) for name in ("tp_size", "pp_size", "dp_size")]
    if "tp_size" not in read or not all(type(size) is int and size > 0 for size in sizes):
        return None
    return EngineParallelism(*sizes, shares_attention=read.get("enable_dp_attention") is True)


def _describe_error(error: Exception) -> str:
    return str(error) or type(error).__name__
