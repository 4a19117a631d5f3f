"""Clocks for benchmarks: works take turns in one process, and the median of five runs is told."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.bench.figures import record

Work = Callable[[], Any]
Clock = Callable[[Work], float]

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ROUNDS, IN_A_ROW = 5, 10
AHEAD = 20_000_000
"""Cycles that a GPU waits before it is timed: so long its queue is filled, and what is measured is
not how fast a processor launches."""

CACHES = 256 * 2**20
"""Bytes of zeros that are written before, more than its caches hold."""


def seconds(work: Work) -> float:
    """Of one run; on a GPU of one of ten in a row, after its caches held something else."""
    if not CUDA:
        return _passed(work, time.perf_counter)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.empty(CACHES, dtype=torch.int8, device=DEVICE).zero_()
    torch.cuda._sleep(AHEAD)
    first.record()
    for _ in range(IN_A_ROW):
        work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / IN_A_ROW


def processor_seconds(work: Work) -> float:
    """The same, but on a CPU of all its threads, which other work disturbs less."""
    return seconds(work) if CUDA else _passed(work, time.process_time)


def medians(works: Mapping[str, Work], clock: Clock = seconds) -> dict[str, float]:
    """Of each, in turns, after one warm run each."""
    for work in works.values():
        work()
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            taken[name].append(clock(work))
    return {name: statistics.median(each) for name, each in taken.items()}


def copying(num_bytes: int) -> Work:
    """What reads and writes so many bytes in all, and does nothing else: no kernel that has to move
    as many is faster."""
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def peak(size: int) -> float:
    """Operations a second of a square product."""
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    found = 2.0 * size**3 / medians({"product": lambda: a @ b})["product"]
    print(f"a square product of {size}: {found / 1e12:.0f} TFLOP/s")
    record(f"square product of {size}", found / 1e12, "TFLOP/s")
    return found


def machine() -> str:
    """What this is measured on."""
    what = torch.cuda.get_device_name() if CUDA else f"CPU, {torch.get_num_threads()} threads"
    return f"{what}, PyTorch {torch.__version__}"


def show(what: str, found: Mapping[str, float], against: str, num_bytes: float = 0) -> None:
    """One line: milliseconds, bytes a second where it is bytes that cost, and ratios to ours."""
    parts = []
    for name, spent in found.items():
        record(f"{what}, {name}", spent * 1e3, "ms")
        rate = f" {num_bytes / spent / 1e9:7.1f} GB/s" if num_bytes and name == "ours" else ""
        parts.append(f"{name} {spent * 1e3:8.3f} ms{rate}")
    ratio = found[against] / found["ours"] if against in found else float("nan")
    print(f"{what:28} {', '.join(parts)}; {against}/ours {ratio:.2f}")


def verdict(what: str, found: float, goal: float, *, at_most: bool = False, unit: str = "") -> str:
    """A figure beside its goal on a GPU, which it is to reach or with `at_most` not to exceed."""
    reached = record(what, found, unit, goal=goal if CUDA else None, at_most=at_most)
    shown = f"{what} {found:.2f}{unit and f' {unit}'}"
    bound = f"{'at most ' if at_most else ''}{goal}"
    if reached is None:
        return f"{shown} (goal on a GPU {bound})"
    return f"{shown} (goal {bound}: {'reached' if reached else 'MISSED'})"


def _passed(work: Work, clock: Callable[[], float]) -> float:
    start = clock()
    work()
    return clock() - start
