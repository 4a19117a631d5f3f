"""Process info: rank, world size, device, and small collectives over all ranks."""

import datetime
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

from penstock.core import env
from penstock.core.process.rank_heartbeat import Heartbeat
from penstock.core.process.rendezvous_endpoint import loopback_interface
from penstock.engine.device import rank_device
from penstock.engine.distributed.object_unpickler import restrict_pickling
from penstock.engine.launch.stores import env_store, named_store

T = TypeVar("T")

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ProcessInfo:
    """One rank's view of the distributed run."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    heartbeat: Heartbeat = field(default_factory=Heartbeat, compare=False)

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, which writes and logs for all."""
        return self.rank == 0

    def all_reduce_sum(self, value: torch.Tensor) -> torch.Tensor:
        with self.heartbeat.waiting():
            dist.all_reduce(value, op=dist.ReduceOp.SUM)
        return value

    def all_reduce_max(self, value: torch.Tensor) -> torch.Tensor:
        with self.heartbeat.waiting():
            dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value

    def any_rank(self, flag: bool) -> bool:
        return bool(self.max_over_ranks(flag)[0])

    def max_over_ranks(self, *values: int) -> list[int]:
        """The maximum of each value over all ranks; the same result on all ranks."""
        marks = torch.tensor([int(value) for value in values], device=self.device)
        with self.heartbeat.waiting():
            dist.all_reduce(marks, op=dist.ReduceOp.MAX)
            return marks.tolist()

    def all_gather(self, value: T) -> list[T]:
        """Each rank's `value`, in rank order."""
        gathered = [value] * self.world_size
        with self.heartbeat.waiting():
            dist.all_gather_object(gathered, value)
        return gathered

    def barrier(self) -> None:
        with self.heartbeat.waiting():
            dist.barrier()


def init_process_group(
    timeout_seconds: float, heartbeat: Heartbeat | None = None, *, reaches_out: bool = False
) -> ProcessInfo:
    """Join the process group that torchrun's variables describe (world size 1 without them).

    A collective that does not complete within `timeout_seconds` fails instead of hanging. Ranks of
    one machine listen on loopback; with `reaches_out` NCCL may choose another interface, because
    this process will connect to other machines and NCCL chooses its interface once per process.
    """
    heartbeat = heartbeat or Heartbeat()
    rank, local_rank, world = env.rank_variables() or (0, 0, 1)
    timeout = datetime.timedelta(seconds=timeout_seconds)
    device, backend, device_id = rank_device(local_rank), "gloo", None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # On Hopper scaled_dot_product_attention selects its cuDNN backend, which builds a plan for
        # each new input shape (70 ms on an H200): for each new document length of packed rows, and
        # in decoding for each length of the KV cache.
        torch.backends.cuda.enable_cudnn_sdp(enabled=False)
        # By default cuBLAS may reduce the partial sums of split-K matmuls in bf16 or fp16.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        backend, device_id = "nccl", device
    heartbeat.set_phase("joining the other ranks")
    if not dist.is_initialized():
        restrict_pickling()
        if env.is_one_machine():
            # By default gloo and NCCL listen on an interface that other machines can reach.
            interface = loopback_interface()
            env.default({"GLOO_SOCKET_IFNAME": interface})
            if not reaches_out:
                env.default({"NCCL_SOCKET_IFNAME": interface})
        with heartbeat.waiting():
            store = _store(rank, world, timeout)
            dist.init_process_group(
                backend,
                store=store,
                rank=rank if store else -1,
                world_size=world if store else -1,
                timeout=timeout,
                # NCCL connects at once then: its errors show here, not in a first collective.
                device_id=device_id,
            )
    return ProcessInfo(rank, local_rank, world, device, heartbeat)


def _store(rank: int, world: int, timeout: datetime.timedelta) -> dist.Store | None:
    """The rendezvous store of the ranks."""
    if world == 1:
        # In memory: nobody else could connect, so no port is opened.
        return dist.HashStore()
    if named := env.ranks_store():
        return named_store(named, timeout)
    if master := env.master_address():
        address, port = master
        if not env.agent_serves_store() and env.is_one_machine():
            address = LOOPBACK
        return env_store(rank, address, port, timeout)
    # Not configured: torch raises its own error.
    return None


def destroy_process_group() -> None:
    """Destroy the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
