"""Measure matmul FLOP/s and memory bandwidth: `python -m penstock.estimate.costs.measure_machine`.

Prints one JSON object. A separate process, because it needs torch and all CPU cores.
"""

import json
import sys
import time
from collections.abc import Callable

import torch

from penstock.engine.device import rank_device

MATRIX_SIZES = {"cpu": 1024, "cuda": 8192}
COPY_BYTES = {"cpu": 64 << 20, "cuda": 2 << 30}
ROUNDS = 5


def measure() -> dict[str, float | str | None]:
    """Median FLOP/s of square matmuls, and bytes per second read and written by a copy."""
    device = rank_device(0)
    size = MATRIX_SIZES[device.type]
    measurement: dict[str, float | str | None] = {"name": None, "torch": torch.__version__}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        measurement |= {"name": properties.name, "memory": float(properties.total_memory)}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a = torch.randn(size, size, device=device).to(dtype)
        # size**3 multiplications, and as many additions.
        measurement[name] = 2.0 * size**3 / _seconds(lambda a=a: a @ a, device)
    numbers = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(numbers)
    measurement["bandwidth"] = 2.0 * len(numbers) / _seconds(lambda: target.copy_(numbers), device)
    return measurement


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    durations: list[float] = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            # CUDA launches return at once: without it the launch alone would be measured.
            torch.cuda.synchronize(device)
        durations.append(time.perf_counter() - started)
    # Skip the first one (warmup).
    return sorted(durations[1:])[ROUNDS // 2]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure()) + "\n")
