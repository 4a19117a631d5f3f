"""Inference endpoints of weight sync, and their API keys."""

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock.server.protocol.requests import AddEndpoint, ListEndpoints, RemoveEndpoint
from penstock.server.protocol.results import EndpointsResult
from penstock.server.protocol.types import Endpoint, Secret, common_fields
from penstock.server.scheduler.errors import RequestError, not_found, to_request_error
from penstock.server.scheduler.queue import Outcome
from penstock.server.scheduler.state_store import EndpointRecord, StateStore
from penstock.server.weight_sync.allowed_hosts import why_not_allowed
from penstock.server.weight_sync.errors import SyncError
from penstock.server.weight_sync.sglang_client import (
    EngineParallelism,
    InferenceServer,
    Limits,
    recovery_requests,
    run_in_background,
)

LOG = logging.getLogger(__name__)

HEADER = re.compile(r"[!-~]+")  # Characters allowed in a key
MAX_OWNER_ENDPOINTS = 64  # Maximum endpoints per owner, including those being added
# Seconds for a new server to report its parallelism; it may not be running yet.
PARALLELISM_SECONDS = 3.0


@dataclass
class InferenceEndpoints:
    """The endpoints of all owners, with their keys."""

    store: StateStore
    allowed_hosts: Collection[str]
    _adding: dict[asyncio.Task[None], str] = field(default_factory=dict[asyncio.Task[None], str])
    """Owners of the endpoints that are being added."""

    def add(self, operation: AddEndpoint, owner: str, end: Callable[[Outcome], None]) -> None:
        """Register an endpoint, replacing one at the same address; `end` receives the outcome,
        because the server is first asked whether weights can be sent to it. Raises RequestError if
        the owner has the maximum number."""
        new = operation.endpoint
        count = sum(endpoint.owner == owner for endpoint in self._others(owner, new.host, new.port))
        count += sum(adding_owner == owner for adding_owner in self._adding.values())
        if count >= MAX_OWNER_ENDPOINTS:
            raise RequestError(
                "busy",
                f"{count} inference endpoints of yours are known, and {MAX_OWNER_ENDPOINTS} may"
                " be.\n  Remove one that is not needed.",
            )
        task = asyncio.create_task(self._add(operation, owner, end))
        # asyncio itself refers to tasks only weakly.
        self._adding[task] = owner
        task.add_done_callback(self._adding.pop)

    async def _add(
        self, operation: AddEndpoint, owner: str, end: Callable[[Outcome], None]
    ) -> None:
        try:
            end(await self._added(operation, owner))
        except Exception as error:  # noqa: BLE001 - a failed request must not stop others
            end(to_request_error(error))

    async def _added(self, operation: AddEndpoint, owner: str) -> EndpointsResult:
        new = operation.endpoint
        if not 0 < new.port < 65536 or new.world_size < 1 or not new.host:
            raise RequestError(
                "invalid",
                f"{new.host[:200]}:{new.port} of {new.world_size} ranks is no inference server",
            )
        if operation.api_key and not HEADER.fullmatch(operation.api_key.text):
            raise RequestError("invalid", "the api_key holds what no header of HTTP may")
        fault = why_not_allowed(new, self.allowed_hosts)
        if fault is not None:
            raise RequestError("invalid", fault)
        sizes = await _sizes(InferenceServer(new, operation.api_key))
        world_size = new.world_size if operation.is_sized or sizes is None else sizes.tensor
        fault = sizes.fault(world_size) if sizes else None
        if fault is not None:
            raise RequestError("invalid", f"{new.address}: {fault}")
        fields: dict[str, Any] = common_fields(new, EndpointRecord)
        fields["world_size"] = world_size
        api_key = operation.api_key.text if operation.api_key else None
        record = EndpointRecord(owner=owner, api_key=api_key, **fields)
        self.store.save_endpoints((*self._others(owner, new.host, new.port), record))
        return self._all(owner)

    def run(self, operation: RemoveEndpoint | ListEndpoints, owner: str) -> EndpointsResult:
        """The remaining or registered endpoints. Raises RequestError for an unknown one."""
        if isinstance(operation, RemoveEndpoint):
            remaining = self._others(owner, operation.host, operation.port)
            if len(remaining) == len(self.store.endpoints):
                raise not_found(f"inference endpoint {operation.host[:200]}:{operation.port}")
            self.store.save_endpoints(remaining)
        return self._all(owner)

    def _all(self, owner: str) -> EndpointsResult:
        own = (endpoint for endpoint in self.store.endpoints if endpoint.owner == owner)
        return EndpointsResult(endpoints=tuple(map(_endpoint, own)))

    def _others(self, owner: str, host: str, port: int) -> tuple[EndpointRecord, ...]:
        excluded, endpoints = (owner, host, port), self.store.endpoints
        return tuple(
            endpoint
            for endpoint in endpoints
            if (endpoint.owner, endpoint.host, endpoint.port) != excluded
        )


def list_endpoints(
    store: StateStore, owner: str, pools: Collection[str]
) -> tuple[tuple[Endpoint, Secret | None], ...]:
    """The owner's endpoints in these pools, or all of them, with their keys."""
    return tuple(
        (_endpoint(record), Secret(text=record.api_key) if record.api_key else None)
        for record in store.endpoints
        if record.owner == owner and (not pools or record.pool in pools)
    )


def target_endpoints(
    store: StateStore, owner: str, pools: Collection[str], allowed_hosts: Collection[str]
) -> tuple[tuple[Endpoint, Secret | None], ...]:
    """The same. Raises RequestError if there are none, or if one is no longer allowed."""
    targets = list_endpoints(store, owner, pools)
    if not targets:
        suffix = f" in {', '.join(pools)[:200]}" if pools else ""
        raise RequestError("invalid", f"there are no inference endpoints{suffix}; add one first")
    for endpoint, _ in targets:
        if (fault := why_not_allowed(endpoint, allowed_hosts)) is not None:
            raise RequestError("invalid", fault)
    return targets


def resume_inference_servers(
    sent: Iterable[tuple[Endpoint, Secret | None]], group_name: str
) -> None:
    """In the background, resume generation on servers that dead workers may have left paused."""
    for endpoint, key in sent:
        run_in_background(partial(_resume_server, InferenceServer(endpoint, key), group_name))


def _resume_server(server: InferenceServer, group_name: str) -> None:
    for step, path, body in recovery_requests(group_name):
        try:
            server.post(path, body, step=step, seconds=Limits.late)
        except SyncError as error:
            LOG.warning("after a sync that was lost: %s", error)


def _endpoint(record: EndpointRecord) -> Endpoint:
    return Endpoint(**common_fields(record, Endpoint))


async def _sizes(server: InferenceServer) -> EngineParallelism | None:
    """The server's parallelism, if it responds within PARALLELISM_SECONDS."""
    future: Future[EngineParallelism | None] = run_in_background(
        lambda: server.sizes(PARALLELISM_SECONDS)
    )
    try:
        async with asyncio.timeout(PARALLELISM_SECONDS):
            return await asyncio.wrap_future(future)
    except TimeoutError:
        return None
    except SyncError as error:
        raise RequestError("invalid", f"{server.endpoint.address}: {error.fault}") from error
