"""Steps of optimizers, ours and torch's: `python -m tests.bench.kernels.bench_optimizers [--dry]`.

Medians of five, in turns, after one warm run each. AdamW on a large matrix, in float32 and with
everything in bfloat16, beside torch's fused one and beside copying as many bytes (goal on a GPU: at
least 0.85 of its speed); AdamW of many small vectors, together and one by one; and the iteration of
Muon on a stack of matrices, beside torch's own, one matrix after another. On a CPU what runs are
the references.
"""

import argparse

import torch
from tests.bench.timing import CUDA, DEVICE, Work, copying, machine, medians, show, verdict
from torch.optim import _muon

from penstock_kernels.adamw import RowKeys, Settings, StepTensors, adamw_, adamw_foreach_
from penstock_kernels.newton_schulz import COEFFICIENTS, EPS, STEPS, newton_schulz

SHAPE = (16384, 8192) if CUDA else (1024, 2048)
STACK = (8, 4096, 4096) if CUDA else (4, 512, 1024)
NORM = 4096 if CUDA else 256
GOAL = 0.85
NOW = Settings(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=10)


def adamw(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Of one matrix; what torch's keeps in bfloat16 is rounded to the nearest."""
    weight, gradient, first, second = (
        torch.randn(shape, device=DEVICE).abs().to(dtype) for _ in range(4)
    )
    theirs = torch.nn.Parameter(weight.clone())
    theirs.grad = gradient
    optimizer = torch.optim.AdamW([theirs], lr=NOW.lr, betas=(0.9, 0.95), fused=True)
    # Seven passes over as many bytes: four are read and three written.
    moved = 7 * weight.nbytes
    works: dict[str, Work] = {
        "ours": lambda: adamw_(weight, gradient, first, second, NOW),
        "torch": optimizer.step,
        "copying": copying(moved),
    }
    if dtype == torch.bfloat16:
        runs = [RowKeys(shape[0], 7)]
        works["at random"] = lambda: adamw_(weight, gradient, first, second, NOW, runs)
    found = medians(works)
    show(f"adamw {dtype}", found, "torch", moved)
    for name in ("ours", "at random"):
        if name in found:
            print(f"{'':28} {verdict(f'{name}, of copying', found['copying'] / found[name], GOAL)}")


def many(dtype: torch.dtype, count: int) -> None:
    """Of vectors such as norms have, side by side and one by one."""
    ours = [
        StepTensors(*(torch.randn(NORM, device=DEVICE).abs().to(dtype) for _ in range(4)))
        for _ in range(count)
    ]
    theirs = [torch.nn.Parameter(one.weight.clone()) for one in ours]
    for parameter, one in zip(theirs, ours, strict=True):
        parameter.grad = one.gradient
    works: dict[str, Work] = {
        "ours": lambda: adamw_foreach_(ours, NOW, adamw_),
        "one by one": lambda: adamw_foreach_(ours, NOW, adamw_, 0),
        "torch": torch.optim.AdamW(theirs, fused=True).step,
        "torch foreach": torch.optim.AdamW(theirs, foreach=True).step,
    }
    show(f"adamw of {count} vectors {dtype}", medians(works), "torch")


def muon(shape: tuple[int, int, int]) -> None:
    """Of a stack, each matrix of which torch takes by itself."""
    stack = torch.randn(shape, device=DEVICE)
    works: dict[str, Work] = {
        "ours": lambda: newton_schulz(stack),
        "batched": lambda: newton_schulz.backend("batched")(stack),
        "torch": lambda: [
            _muon._zeropower_via_newtonschulz(one, COEFFICIENTS, STEPS, EPS) for one in stack
        ],
    }
    show(f"newton_schulz {shape}", medians(works), "torch")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry", action="store_true", help="small matrices")
    dry = parser.parse_args().dry
    print(machine())
    for dtype in (torch.float32, torch.bfloat16):
        adamw(dtype, (64, 128) if dry else SHAPE)
        many(dtype, 4 if dry else 120)
    muon((2, 32, 64) if dry else STACK)


if __name__ == "__main__":
    main()
