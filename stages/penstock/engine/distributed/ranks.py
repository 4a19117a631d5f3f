"""This process among the others: who it is, its device, and what ranks ask together."""

import datetime
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

from penstock.core import env
from penstock.core.process.rank_heartbeat import Heartbeat
from penstock.core.process.rendezvous import loopback_interface
from penstock.engine.distributed.object_unpickler import restrict_pickling
from penstock.engine.launch.stores import env_store, named_store

T = TypeVar("T")

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ProcessInfo:
    """One rank's view of the world."""

    rank: int
    local_rank: int
    world: int
    device: torch.device
    pulse: Heartbeat = field(default_factory=Heartbeat, compare=False)
    """Where this rank tells what it does."""

    @property
    def leads(self) -> bool:
        """Whether this is the rank that writes and speaks for all."""
        return self.rank == 0

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of `value` over all ranks, in place."""
        with self.pulse.waiting():
            dist.all_reduce(value, op=dist.ReduceOp.SUM)
        return value

    def highest(self, value: torch.Tensor) -> torch.Tensor:
        """The highest `value` of any rank, number by number, in place."""
        with self.pulse.waiting():
            dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value

    def anywhere(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank; all ranks get the same answer."""
        return bool(self.most(flag)[0])

    def most(self, *values: int) -> list[int]:
        """The highest of each of these values on any rank; all ranks get the same answer."""
        marks = torch.tensor([int(value) for value in values], device=self.device)
        with self.pulse.waiting():
            dist.all_reduce(marks, op=dist.ReduceOp.MAX)
            return marks.tolist()

    def gather(self, value: T) -> list[T]:
        """Each rank's `value`, in rank order, on every rank."""
        found = [value] * self.world
        with self.pulse.waiting():
            dist.all_gather_object(found, value)
        return found

    def wait(self) -> None:
        """Wait until every rank is here."""
        with self.pulse.waiting():
            dist.barrier()


def init_process_group(
    timeout_seconds: float, pulse: Heartbeat | None = None, *, reaches_out: bool = False
) -> ProcessInfo:
    """Join the process group that torchrun's variables describe (a world of one without them).

    A collective that does not complete within `timeout_seconds` fails instead of hanging. Ranks of
    one machine listen on loopback; with `reaches_out` NCCL, which asks for its interface once in a
    process, may choose another: this process will speak over it to other machines.
    """
    pulse = pulse or Heartbeat()
    rank, local_rank, world = env.rank_variables() or (0, 0, 1)
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if torch.cuda.is_available():
        # A scheduler may show each process its own device alone, as number 0.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        backend, device_id = "nccl", device
    else:
        device, backend, device_id = torch.device("cpu"), "gloo", None
    pulse.begins("joining the other ranks")
    if not dist.is_initialized():
        restrict_pickling()
        if env.is_one_machine():
            # Gloo and NCCL by themselves listen on an interface that others reach.
            interface = loopback_interface()
            env.default({"GLOO_SOCKET_IFNAME": interface})
            if not reaches_out:
                env.default({"NCCL_SOCKET_IFNAME": interface})
        with pulse.waiting():
            store = _store(rank, world, timeout)
            dist.init_process_group(
                backend,
                store=store,
                rank=rank if store else -1,
                world_size=world if store else -1,
                timeout=timeout,
                device_id=device_id,
            )
    return ProcessInfo(rank, local_rank, world, device, pulse)


def _store(rank: int, world: int, timeout: datetime.timedelta) -> dist.Store | None:
    """Where the ranks find each other. None: nobody has told, which is for torch to say."""
    if world == 1:
        return dist.HashStore()
    if named := env.ranks_store():
        return named_store(named, timeout)
    if master := env.master_address():
        address, port = master
        if not env.agent_serves_store() and env.is_one_machine():
            address = LOOPBACK
        return env_store(rank, address, port, timeout)
    return None


def destroy_process_group() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
