"""Where a step of Qwen3-8B spends its time: `python -m tests.bench.gpu.profile --case CASE`.

PyTorch's profiler over two warm steps: the kernels by their share, and how long the GPU did
nothing. A Chrome trace is kept where figures are. Then the host syncs of a step, and their places.
"""

import argparse
import gzip
import os
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from penstock.engine.distributed.ranks import destroy_process_group, init_process_group
from penstock.train.trainer import Trainer
from tests.bench.bench_gpu import CASES, OURS
from tests.bench.figures import out_folder, record
from tests.bench.timing import CUDA, machine, verdict
from tests.bench.train_cuda import WARMING, build_trainer
from tests.engine import loops, runs

STEPS = 2
SHOWN = 20
IDLE = 0.05
"""Share of a step in which the GPU may do nothing."""

SYNCS = 1
TRACE_BYTES = 15 * 2**20


def show_kernels(found: Any, seconds: float) -> None:
    """Print kernels by their time, and record the GPU's idle share."""
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name] += event.device_time_total / 1e6
            calls[event.name] += 1
    busy = sum(spent.values())
    print(f"{STEPS} steps in {seconds:.3f} s, {sum(calls.values())} kernels and copies")
    for name, each in spent.most_common(SHOWN):
        print(f"{each / seconds:6.1%} {each / STEPS * 1e3:8.2f} ms {calls[name]:6} x {name[:90]}")
    record("kernels and copies of a step", sum(calls.values()) / STEPS)
    if CUDA:
        print(verdict("idle share of the GPU", max(0.0, 1 - busy / seconds), IDLE, at_most=True))


def save_trace(found: Any, name: str) -> None:
    """Keep the trace, unless it is large."""
    if (folder := out_folder()) is None:
        return
    with tempfile.TemporaryDirectory() as made:
        plain = Path(made) / "trace.json"
        found.export_chrome_trace(str(plain))
        packed = gzip.compress(plain.read_bytes())
    if len(packed) <= TRACE_BYTES:
        (folder / f"{name}.json.gz").write_bytes(packed)


def count_syncs(loop: Trainer) -> int:
    """Host syncs of one step, as PyTorch's debug mode tells them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if CUDA:
            torch.cuda.set_sync_debug_mode("warn")
        loops.step(loop)
        if CUDA:
            torch.cuda.set_sync_debug_mode("default")
    # Another warning says that the mode is a prototype.
    found = [one for one in caught if "called a synchronizing" in str(one.message)]
    for one in found:
        print(f"a host sync at {os.path.relpath(one.filename)}:{one.lineno}")
    return len(found)


def open_that_fits(name: str, folder: Path, *, dry: bool) -> Trainer:
    """The case's loop, after its first steps, with as little recomputed as fits."""
    ranks = init_process_group(600)
    small = {"shape": runs.TINY, "row": 64, "document": 20} if dry else {}
    for recomputed, train in OURS.items():
        case = replace(CASES[name], train={**CASES[name].train, **train}, **small)
        try:
            loop = build_trainer(case, folder / recomputed, ranks)
            for _ in range(WARMING):
                loops.step(loop)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            continue
        print(f"{case.name}, {recomputed} recomputed")
        return loop
    raise SystemExit("does not fit")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=[*CASES], default="adapters")
    parser.add_argument("--dry", action="store_true")
    asked = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as made:
        loop = open_that_fits(asked.case, Path(made), dry=asked.dry)
        # What the CPU does is a hundred times as many events, and read for minutes.
        activity = ProfilerActivity.CUDA if CUDA else ProfilerActivity.CPU
        with profiler(activities=[activity], acc_events=True) as found:
            started = time.perf_counter()
            for _ in range(STEPS):
                loops.step(loop)
            seconds = time.perf_counter() - started
        show_kernels(found, seconds)
        save_trace(found, f"step-{asked.case}")
        print(verdict("host syncs of a step", count_syncs(loop), SYNCS, at_most=True))
    destroy_process_group()


if __name__ == "__main__":
    main()
