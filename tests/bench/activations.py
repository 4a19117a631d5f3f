"""What one rank of a run holds, sends and takes in a step."""

import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.train.launch.job import Job
from tests.engine import loops

WARMING, MEASURED = 1, 5


@dataclass(frozen=True)
class Cost:
    """Of one step of one rank."""

    peak: int
    """Bytes that tensors made in the step took at most at the same time, but for those moved."""
    moved: int
    """Bytes that activation offload moved to host memory."""
    exchanges: int
    """All-to-alls of rows."""
    sent: int
    """Bytes that they took from this rank."""
    seconds: list[float]
    loss: float


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is entered, and are still there.

    Without a GPU, what is moved to host memory is a copy in the same memory, and is counted apart:
    nothing else copies bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.moved = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype == torch.uint8:
            self.moved += result.nbytes
            return result
        taken = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                if storage._cdata not in taken:
                    self._watch(storage)
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        number, size = storage._cdata, storage.nbytes()
        if number in self._known:
            return

        def gone(_: Any) -> None:
            self.now -= size
            del self._known[number]

        self._known[number] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def measured(jobs: Mapping[str, Job]) -> dict[str, Cost]:
    """The costs of each job, whose steps take turns."""
    running = {name: loops.loop_of(job) for name, job in jobs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(WARMING + MEASURED):
        for name, loop in running.items():
            loop.ranks.barrier()
            started = time.perf_counter()
            loops.step(loop)
            loop.ranks.barrier()
            if number >= WARMING:
                seconds[name].append(time.perf_counter() - started)
    return {name: _watched(loop, seconds[name]) for name, loop in running.items()}


def _watched(loop: Any, seconds: list[float]) -> Cost:
    exchange, sizes = dist.all_to_all_single, []

    def noted(out: torch.Tensor, rows: torch.Tensor, *splits: Any, **how: Any) -> Any:
        if rows.is_floating_point():
            sizes.append(rows.nbytes)
        return exchange(out, rows, *splits, **how)

    dist.all_to_all_single = noted
    try:
        with Alive() as alive:
            loss = loops.step(loop)["loss"]
    finally:
        dist.all_to_all_single = exchange
    return Cost(alive.peak, alive.moved, len(sizes), sum(sizes), seconds, loss)
