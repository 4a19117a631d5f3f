"""Checkpoints of a model on the GPU: `python -m tests.bench.gpu.checkpoints [--dry]`.

Qwen3 of 0.6 billion parameters in fp32 with AdamW's states: bytes a second of a save that waits, of
a load, and how long training stands still for a save behind it, beside writing as many bytes.
"""

import argparse
import gc
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from penstock.engine.distributed.ranks import destroy_process_group, init_process_group
from tests.bench.bench_gpu import ON_ONE
from tests.bench.figures import record
from tests.bench.timing import machine, verdict
from tests.bench.train_cuda import QWEN3_0_6B, Case, build_trainer
from tests.engine import loops, runs

CASE = Case("Qwen3-0.6B", QWEN3_0_6B, row=2048, train={**ON_ONE})
OF_DISK, STALL = 0.5, 0.2
"""A save's rate over the disk's, at least; the stall of an asynchronous save over a save, at most.
"""

PROBE = 2**30


def disk_rate(folder: Path, num_bytes: int) -> float:
    """Bytes a second that one thread writes to the disk."""
    block = os.urandom(2**20)
    started = time.perf_counter()
    with (folder / "probe").open("wb", buffering=0) as file:
        for _ in range(max(1, num_bytes // len(block))):
            file.write(block)
        os.fsync(file.fileno())
    spent = time.perf_counter() - started
    (folder / "probe").unlink()
    return max(num_bytes, len(block)) / spent


def save_and_load(case: Case, folder: Path) -> tuple[int, float, float]:
    """Bytes of a checkpoint, and seconds to save and to load it."""
    loop = build_trainer(case, folder, init_process_group(600))
    loops.step(loop)
    os.sync()
    started = time.perf_counter()
    loops.save(loop)
    saved = time.perf_counter() - started
    checkpoint = loop.saves.newest()
    assert checkpoint is not None
    num_bytes = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    started = time.perf_counter()
    loop.saves.load(checkpoint)
    return num_bytes, saved, time.perf_counter() - started


def stall(case: Case, folder: Path) -> tuple[float, float]:
    """Seconds of a step without a save, and of one with a save behind it."""
    case = replace(case, train={**case.train, "save_async": True})
    loop = build_trainer(case, folder, init_process_group(600))
    for _ in range(2):
        loops.step(loop)
    started = time.perf_counter()
    loops.step(loop)
    plain = time.perf_counter() - started
    loop.saves._write(loop.at, {"owes": []})  # the first makes room for copies
    loop.saves.finish()
    loops.step(loop)
    started = time.perf_counter()
    loop.saves._write(loop.at, {"owes": []})
    loops.step(loop)
    behind = time.perf_counter() - started
    loop.saves.finish()
    return plain, behind


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry", action="store_true")
    dry = parser.parse_args().dry
    case = replace(CASE, shape=runs.TINY, row=64, document=20) if dry else CASE
    print(machine())
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        disk = disk_rate(folder, 2**20 if dry else PROBE)
        num_bytes, saved, loaded = save_and_load(case, folder / "at once")
    record("disk, one thread", disk / 1e9, "GB/s")
    record("checkpoint", num_bytes / 1e9, "GB")
    record("save", num_bytes / saved / 1e9, "GB/s")
    record("load", num_bytes / loaded / 1e9, "GB/s")
    print(f"{num_bytes / 1e9:.2f} GB: saved in {saved:.2f} s, loaded in {loaded:.2f} s")
    print(verdict("a save's rate over the disk's", num_bytes / saved / disk, OF_DISK))
    gc.collect()
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as made:
        plain, behind = stall(case, Path(made) / "behind")
    print(f"a step {plain:.3f} s; with a save behind it {behind:.3f} s")
    more = max(0.0, behind - plain) / saved
    print(verdict("stall of a save behind training over a save", more, STALL, at_most=True))
    destroy_process_group()


if __name__ == "__main__":
    main()
