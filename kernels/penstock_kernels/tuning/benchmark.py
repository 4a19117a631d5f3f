"""Times of kernels on a GPU: medians of interleaved rounds."""

# pyright: reportMissingImports=false

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.errors import OutOfResources, PTXASError

ROUNDS = 5
ROUND_MICROSECONDS = 1000.0
"""Target microseconds of a round of one candidate, or a single launch if that takes longer."""
MAX_LAUNCHES = 50
"""Launches in a round."""


def microseconds(works: Sequence[Callable[[], Any]]) -> list[float]:
    """Of a launch of each; infinity for launches that do not fit on the device. Synchronizes."""
    launches = []
    for work in works:
        try:
            # It compiles the kernel.
            work()
        except (OutOfResources, PTXASError, CompileTimeAssertionFailure):
            launches.append(0)
            continue
        count = int(ROUND_MICROSECONDS / max(_timed(work, 1), 1.0))
        launches.append(min(max(count, 1), MAX_LAUNCHES))
    durations: list[list[float]] = [[] for _ in works]
    # One round of each in turn: a change of clocks then affects all candidates alike.
    for _ in range(ROUNDS):
        for work, count, times in zip(works, launches, durations, strict=True):
            if count:
                times.append(_timed(work, count))
    return [statistics.median(times) if times else math.inf for times in durations]


def _timed(work: Callable[[], Any], count: int) -> float:
    # Events, because a launch returns before its kernel runs: a host clock would time the queue.
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / count
