"""This process among the others: who it is, its device, and what ranks ask together."""

import datetime
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

from penstock.core import env
from penstock.core.pulse import Pulse

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """One rank's view of the world."""

    rank: int
    local_rank: int
    world: int
    device: torch.device
    pulse: Pulse = field(default_factory=Pulse, compare=False)
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


def join(timeout_seconds: float, pulse: Pulse | None = None) -> Ranks:
    """Join the process group that torchrun's variables describe (a world of one without them).

    A collective that does not complete within `timeout_seconds` fails instead of hanging.
    """
    pulse = pulse or Pulse()
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
        store = dist.HashStore() if world == 1 else None
        with pulse.waiting():
            dist.init_process_group(
                backend,
                store=store,
                rank=rank if store else -1,
                world_size=world if store else -1,
                timeout=timeout,
                device_id=device_id,
            )
    return Ranks(rank, local_rank, world, device, pulse)


def leave() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
