"""Steps of optimizers, ours and torch's: `PYTHONPATH=. python tests/bench/bench_optimizers.py`.

Medians of five, in turns, after one warm run each. AdamW on a large matrix, in float32 and with
everything in bfloat16, beside torch's fused one and beside copying as many bytes (goal on a GPU: at
least 0.85 of its speed); and the iteration of Muon on a stack of matrices, beside torch's own, one
matrix after another. On a CPU what runs are the references.
"""

import torch
from tests.bench.bench_quant import CUDA, DEVICE, Work, medians, show
from torch.optim import _muon

from penstock_kernels.adamw import Run, Settings, adamw_
from penstock_kernels.newton_schulz import COEFFICIENTS, EPS, STEPS, newton_schulz

SHAPE = (16384, 8192) if CUDA else (1024, 2048)
STACK = (8, 4096, 4096) if CUDA else (4, 512, 1024)
NOW = Settings(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=10)


def adamw(dtype: torch.dtype) -> None:
    """Of one matrix; what torch's keeps in bfloat16 is rounded to the nearest."""
    weight, gradient, first, second = (
        torch.randn(SHAPE, device=DEVICE).abs().to(dtype) for _ in range(4)
    )
    theirs = torch.nn.Parameter(weight.clone())
    theirs.grad = gradient
    optimizer = torch.optim.AdamW([theirs], lr=NOW.lr, betas=(0.9, 0.95), fused=True)
    # Seven passes over as many bytes: four are read and three written.
    moved = 7 * weight.nbytes
    source = torch.empty(moved // 2, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    works: dict[str, Work] = {
        "ours": lambda: adamw_(weight, gradient, first, second, NOW),
        "torch": optimizer.step,
        "copying": lambda: target.copy_(source),
    }
    if dtype == torch.bfloat16:
        runs = [Run(SHAPE[0], 7)]
        works["at random"] = lambda: adamw_(weight, gradient, first, second, NOW, runs)
    found = medians(works)
    show(f"adamw {dtype}", found, "torch", moved)
    print(f"{'':28} copying/ours {found['copying'] / found['ours']:.2f}")


def muon() -> None:
    """Of a stack, each matrix of which torch takes by itself."""
    stack = torch.randn(STACK, device=DEVICE)
    works: dict[str, Work] = {
        "ours": lambda: newton_schulz(stack),
        "batched": lambda: newton_schulz.backend("batched")(stack),
        "torch": lambda: [
            _muon._zeropower_via_newtonschulz(one, COEFFICIENTS, STEPS, EPS) for one in stack
        ],
    }
    show(f"newton_schulz {STACK}", medians(works), "torch")


if __name__ == "__main__":
    print(torch.cuda.get_device_name() if CUDA else "CPU", f"PyTorch {torch.__version__}")
    adamw(torch.float32)
    adamw(torch.bfloat16)
    muon()
