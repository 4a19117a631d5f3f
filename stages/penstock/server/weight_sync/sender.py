"""Weight sync to inference servers, with SGLang's weight update API.

    health -> group -> pause -> flush -> bucket after bucket -> destroy -> continue

All servers get each request concurrently. An error at one of them aborts the sync for all: paused
servers resume, the process group is destroyed, and training continues. A server that received part
of an update then has mixed weights of two steps until the next sync.
"""

import itertools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from typing import Any

import torch

from penstock.engine.distributed.external_group import ExternalProcessGroup
from penstock.engine.distributed.full_tensors import FullTensorGather
from penstock.engine.distributed.param_shards import LocalParam
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.hf.base_model import BaseModelWeights
from penstock.engine.hf.live_state_dict import RankTrimmedTensors, language_in_files, live_weights
from penstock.engine.hf.state_dict import Tensors
from penstock.engine.model_source import LoraArgs
from penstock.engine.quantization.select_layers import Formats
from penstock.models.tp_roles import Roles
from penstock.models.weights import WeightMap
from penstock.server.protocol.results import SyncWeightsResult
from penstock.server.protocol.worker_commands import WeightSyncCommand
from penstock.server.weight_sync.allowed_hosts import LOOPBACK, address_towards, require_allowed
from penstock.server.weight_sync.block_fp8 import quantized_shapes, wants_fp8
from penstock.server.weight_sync.buckets import BucketPlan
from penstock.server.weight_sync.errors import Step, SyncError, refused
from penstock.server.weight_sync.sglang_client import (
    InferenceServer,
    Limits,
    is_absent,
    recovery_requests,
    run_in_background,
)

LOG = logging.getLogger(__name__)

MIB = 1 << 20


@dataclass(frozen=True)
class RankModelView:
    """One rank's view of a model."""

    params: Sequence[LocalParam]  # Every parameter, including frozen ones
    names: WeightMap
    roles: Roles
    dtype: torch.dtype = torch.bfloat16
    """The dtype to send in; tensors that a checkpoint keeps exact are not cast."""
    adapting: LoraArgs | None = None  # None without adapters
    rank: int | None = None
    """The LoRA rank of the adapter, if its storage is padded to a larger rank."""
    formats: Formats | None = None  # Formats of the base model's quantized weights
    multimodal: BaseModelWeights | None = None
    """The base of a multimodal model, whose language model is sent; None for a text model."""


def sync_weights(
    command: WeightSyncCommand,
    model_view: RankModelView,
    ranks: ProcessInfo,
    *,
    allowed: Collection[str] = LOOPBACK,
    limits: Limits | None = None,
) -> SyncWeightsResult | None:
    """Send the model, with merged adapters, to all endpoints of the command. Collective; rank 0
    returns the result, whose `num_parameters` counts tensors. Sends requests only to hosts in
    `allowed`. Raises SyncError, only on rank 0."""
    tensors = FullTensorGather(model_view.params, ranks)
    if not ranks.is_main_process:
        tensors.serve()
        return None
    try:
        with torch.no_grad():
            return _WeightSync(
                command, model_view, tensors, ranks.device, allowed, limits or Limits()
            ).run()
    finally:
        tensors.stop_serving()


class _WeightSync:
    """One weight sync, on rank 0."""

    def __init__(
        self,
        command: WeightSyncCommand,
        model_view: RankModelView,
        tensors: Tensors,
        device: torch.device,
        allowed: Collection[str],
        limits: Limits,
    ) -> None:
        _validate(command, allowed)
        if model_view.multimodal and wants_fp8(command.quantization):
            raise refused(
                "the language model of a multimodal model is not sent in FP8.\n"
                "  Leave quantization out."
            )
        self._order, self._device, self._limits = command, device, limits
        quantized = (
            quantized_shapes(model_view.names, model_view.roles)
            if wants_fp8(command.quantization)
            else {}
        )
        weights = live_weights(
            tensors if model_view.rank is None else RankTrimmedTensors(tensors, model_view.rank),
            model_view.names,
            adapting=model_view.adapting,
            formats=model_view.formats,
        )
        if model_view.multimodal:
            weights = language_in_files(weights, model_view.multimodal)
        self._bucket_plan = BucketPlan(weights, model_view.dtype, quantized)
        keys = command.api_keys or [None] * len(command.endpoints)
        self._servers = list(map(InferenceServer, command.endpoints, keys))
        self._address = command.master_address or address_towards(command.endpoints)
        self._size = 1 + sum(endpoint.world_size for endpoint in command.endpoints)

    def run(self) -> SyncWeightsResult:
        started = time.monotonic()
        limits = self._limits

        def check(server: InferenceServer) -> None:
            server.require_alive(limits.health)
            server.require_size(limits.health)

        # Up to three routes of health and two of parallelism, one after another.
        self._call_all(check, "health", limits.health * 6)
        group = self._create_group()
        try:
            self._join(group)
            mode = {"mode": self._order.pause_mode}
            self._post("/pause_generation", mode, "pause", limits.pause, tries=limits.pauses)
            flushed = not self._order.flush_cache or self._flush()
            buckets = self._bucket_plan.buckets(self._order.buffer_size_mb * MIB)
            for number, names in enumerate(buckets):
                last = number == len(buckets) - 1
                self._update(group, names, flush=last and not flushed, ends=last)
            name = {"group_name": self._order.group_name}
            path = "/destroy_weights_update_group"
            self._post(path, name, "destroy", limits.pause, own_part=group.close)
            self._post("/continue_generation", {}, "continue", limits.pause)
        except BaseException:
            self._recover(group)
            raise
        specs = [
            spec
            for names in buckets
            for name in names
            for spec in self._bucket_plan.tensor_specs(name)
        ]
        return SyncWeightsResult(
            num_parameters=len(specs),
            total_bytes=sum(spec.nbytes for spec in specs),
            num_buckets=len(buckets),
            seconds=time.monotonic() - started,
            endpoints=self._order.endpoints,
        )

    def _flush(self) -> bool:
        """Flush KV caches; False if a server has no such route: it flushes with the last bucket."""
        # Apart from the update, because a server that cannot flush during it would exit. The
        # servers are paused, so flushing first is safe, and an error has then changed nothing.
        limits = self._limits
        try:
            self._post("/flush_cache", {}, "flush", limits.pause, tries=limits.flushes)
        except SyncError as error:
            if is_absent(error.__cause__):
                return False
            raise SyncError(
                f"{error.fault}\n  Some servers cannot while requests wait; pause_mode abort ends"
                " those.",
                step="flush",
                endpoint=error.endpoint,
            ) from error
        return True

    def _create_group(self) -> ExternalProcessGroup:
        command = self._order
        try:
            return ExternalProcessGroup(
                name=command.group_name,
                address=self._address,
                port=command.master_port,
                size=self._size,
                device=self._device,
                # Our own timeouts expire first and say where.
                seconds=2 * max(self._limits.group, self._limits.update),
                tensor_seconds=self._limits.tensor,
            )
        except (OSError, RuntimeError) as error:
            raise refused(
                f"this machine cannot listen at {self._address}:{command.master_port}: {error}.\n"
                "  Leave master_address and master_port out, or name an address of the training "
                "server's and a free port."
            ) from error

    def _join(self, group: ExternalProcessGroup) -> None:
        seconds = self._limits.group
        sizes = [server.endpoint.world_size for server in self._servers]
        # The trainer is rank 0 of the group.
        offsets = dict(zip(self._servers, itertools.accumulate(sizes, initial=1), strict=False))

        def join(server: InferenceServer) -> None:
            body = {
                "master_address": self._address,
                "master_port": group.port,
                "rank_offset": offsets[server],
                "world_size": self._size,
                "group_name": self._order.group_name,
                "backend": group.backend,
            }
            server.post("/init_weights_update_group", body, step="group", seconds=seconds)

        self._call_all(join, "group", seconds, group.join)

    def _update(
        self, group: ExternalProcessGroup, names: Sequence[str], *, flush: bool, ends: bool
    ) -> None:
        command = self._order
        tensors = self._bucket_plan.tensors(names)
        specs = [spec for name in names for spec in self._bucket_plan.tensor_specs(name)]
        body: dict[str, Any] = {
            "names": [spec.name for spec in specs],
            "dtypes": [str(spec.dtype).removeprefix("torch.") for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": command.group_name,
            "flush_cache": flush,
        }
        if ends and command.weight_version is not None:
            # A server with a partial update does not have that version yet.
            body["weight_version"] = command.weight_version
        send, path = partial(group.broadcast, tensors), "/update_weights_from_distributed"
        self._post(path, body, "update", self._limits.update, own_part=send)

    def _recover(self, group: ExternalProcessGroup) -> None:
        """Leave the process group, and tell every reachable server to leave it and resume
        generation; in the background for servers that do not respond soon."""
        # First, so that a broadcast that is under way ends, here and at the servers.
        group.abort()
        late = self._limits.late
        calls = [
            run_in_background(partial(server.post, path, body, step=step, seconds=late))
            for server in self._servers
            for step, path, body in recovery_requests(self._order.group_name)
        ]
        wait(calls, timeout=self._limits.report)
        group.close_store()
        wait(calls, timeout=self._limits.recovery)
        for call in calls:
            if not call.done() or call.exception():
                fault = call.exception() if call.done() else "a server has not answered yet"
                LOG.warning("after a failed sync: %s", fault)

    def _post(
        self,
        path: str,
        body: dict[str, Any],
        step: Step,
        seconds: float,
        *,
        tries: int = 1,
        own_part: Callable[[], None] | None = None,
    ) -> None:
        """Send one request to all servers; `own_part` is our part, as in `_call_all`."""

        def post(server: InferenceServer) -> None:
            server.post(path, body, step=step, seconds=seconds, tries=tries)

        self._call_all(post, step, seconds * tries, own_part)

    def _call_all(
        self,
        ask: Callable[[InferenceServer], None],
        step: Step,
        seconds: float,
        own_part: Callable[[], None] | None = None,
    ) -> None:
        """Wait for the servers, in order, and for our own part, until one fails. A server's own
        error takes precedence over errors here or at other servers."""
        calls = [run_in_background(partial(ask, server)) for server in self._servers]
        sending = run_in_background(own_part) if own_part else None
        everything = [*calls, sending] if sending else calls
        done, _ = wait(
            everything, timeout=seconds + self._limits.report, return_when=FIRST_EXCEPTION
        )
        broke = sending.exception() if sending in done and sending else None
        if broke or _errors(calls):
            wait(calls, timeout=self._limits.report)
        faults = _errors(calls)
        early = _errors([call for call in calls if call in done])
        timed_out = any(map(_is_late, faults))
        # Blame a dead server first, then the first one to fail; later failures are consequences.
        dead = [error for error in faults if isinstance(error.__cause__, OSError | HTTPException)]
        blamed = [error for error in (*dead, *early) if not _is_late(error)]
        if blamed or (faults and not timed_out):
            raise (blamed or faults)[0]
        if broke and not timed_out:
            raise SyncError(f"the group broke: {broke}", step=step) from broke
        late = [
            server.endpoint
            for server, call in zip(self._servers, calls, strict=True)
            if not call.done() or _is_late(call.exception())
        ]
        if late or (sending and not sending.done()):
            # Servers that wait for a hung server hang, too.
            late_names = f" from {', '.join(server.address for server in late)}" if late else ""
            raise SyncError(
                f"no end within {seconds:g} s{late_names}",
                step=step,
                endpoint=late[0] if len(late) == 1 else None,
            )


def _validate(command: WeightSyncCommand, allowed: Collection[str]) -> None:
    """Raises SyncError for a command that is invalid before any request is sent."""
    if not command.endpoints:
        raise refused("there is no endpoint; add one first")
    addresses = [(endpoint.host, endpoint.port) for endpoint in command.endpoints]
    for endpoint in command.endpoints:
        require_allowed(endpoint, allowed)
        if endpoint.world_size < 1:
            raise refused(f"its world_size is {endpoint.world_size}", endpoint)
        if addresses.count((endpoint.host, endpoint.port)) > 1:
            raise refused("it is listed twice", endpoint)
    if command.flush_cache and command.pause_mode == "in_place":
        raise refused(
            "pause_mode in_place keeps what requests have cached, and flush_cache drops it.\n"
            "  Leave flush_cache out, or pause by retract or abort."
        )
    if command.buffer_size_mb < 1:
        raise refused(f"buffer_size_mb is {command.buffer_size_mb}, and at least 1 is needed")


def _errors(calls: Sequence[Future[None]]) -> list[BaseException]:
    return [fault for call in calls if call.done() and (fault := call.exception())]


def _is_late(fault: BaseException | None) -> bool:
    return fault is not None and isinstance(fault.__cause__, TimeoutError)
