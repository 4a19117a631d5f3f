"""Grouped products of experts, ours in Triton, PyTorch's and QuACK's:
`python -m tests.bench.kernels.bench_group_gemm [--tokens T] [--dry]`.

bfloat16, the two products of Qwen3-30B-A3B's experts (128 of them, 8 per token; 2048 wide, 768
inside), for T tokens (default 16,384) spread evenly and as unevenly as a router does: forward, the
rows' gradient, the weights' gradient. What all compute is compared first; milliseconds are of
launches in turns. QuACK is measured where its package is installed.

Goals: at least 0.9 times PyTorch's speed; and what is picked unasked, all three products of both
matrices together, at 0.6 of the speed of one square product of 8192, which is measured beside them.
With `--dry` and `TRITON_INTERPRET=1` it runs on a CPU, at a shape that says nothing.
"""

import argparse
import statistics
from functools import partial

import torch
from tests.bench.figures import record
from tests.bench.timing import CUDA, DEVICE, Work, machine, medians, peak, verdict

from penstock_kernels.group_gemm import group_gemm, native, quack
from penstock_kernels.group_gemm.autograd import Products
from penstock_kernels.op import HAS_TRITON, INTERPRETED

PER_TOKEN = 8
OF_TORCH, OF_PEAK = 0.9, 0.6


def counts_of(num_rows: int, experts: int, spread: str) -> torch.Tensor:
    """Rows of each expert: the same for all, or drawn with weights that differ by powers."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.ones(experts)
    if spread == "uneven":
        weights = torch.randn(experts, generator=generator).exp()
    drawn = torch.multinomial(weights, num_rows, replacement=True, generator=generator)
    if spread == "even":
        drawn = torch.arange(num_rows) % experts
    return torch.bincount(drawn, minlength=experts)


def implementations() -> dict[str, Products]:
    """What is here to be measured, by name."""
    found = {"native": native.PRODUCTS}
    if HAS_TRITON and (CUDA or INTERPRETED):
        from penstock_kernels.group_gemm import triton

        found["triton"] = triton.PRODUCTS
    if quack.MISSING or not CUDA:
        print(f"not measured: quack ({quack.MISSING or 'needs a GPU'})")
    else:
        found["quack"] = quack.PRODUCTS
    return found


def compare(name: str, works: dict[str, Work], operations: float) -> dict[str, float]:
    """Print the seconds of all, and return them."""
    want = works["native"]()
    for who, work in works.items():
        error = (work() - want).float().norm() / want.float().norm()
        assert error < 1e-2, f"{who} is {error:.1e} off"
    found = medians(works)
    for who, taken in found.items():
        record(f"{name}, {who}", operations / taken / 1e12, "TFLOP/s")
    shown = ", ".join(
        f"{who} {taken * 1e3:6.3f} ms ({operations / taken / 1e12:4.0f} TFLOP/s)"
        for who, taken in found.items()
    )
    print(f"{name:44} {shown}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--dry", action="store_true")
    asked = parser.parse_args()
    if not (CUDA or asked.dry):
        raise SystemExit("grouped products are measured on a GPU, and there is none here")
    tokens, experts, width, inner = (6, 4, 32, 16) if asked.dry else (asked.tokens, 128, 2048, 768)
    num_rows, shapes = (
        PER_TOKEN * tokens,
        {"gate and up": (2 * inner, width), "down": (width, inner)},
    )
    print(f"{machine()}, {num_rows} rows")
    found, fastest = implementations(), peak(64 if asked.dry else 8192)
    ratios: list[float] = []
    for spread in ("even", "uneven"):
        counts = counts_of(num_rows, experts, spread).to(DEVICE)
        # What a plain call takes.
        picked, operations = 0.0, 0.0
        for shape, (N, K) in shapes.items():
            x, dy, weight = (
                torch.randn(size, device=DEVICE, dtype=torch.bfloat16)
                for size in ((num_rows, K), (num_rows, N), (experts, N, K))
            )
            refusal = group_gemm.fast["native"].unsupported_reason(x, weight, counts)
            assert refusal is None, refusal
            for kind, product, given in (
                ("forward", "by_rows", (x, weight, counts)),
                ("rows' gradient", "by_rows", (dy, weight.mT, counts)),
                ("weights' gradient", "of_groups", (dy, x, counts)),
            ):
                each = 2.0 * num_rows * N * K
                works: dict[str, Work] = {
                    who: partial(getattr(products, product), *given)
                    for who, products in found.items()
                }
                taken = compare(f"{spread}, {shape}, {kind}", works, each)
                picked, operations = picked + taken["native"], operations + each
                if "triton" in taken:
                    ratios.append(taken["native"] / taken["triton"])
        print(
            verdict(
                f"{spread}: share of the square product", operations / picked / fastest, OF_PEAK
            )
        )
    if ratios:
        print(verdict("triton's speed / PyTorch's, median", statistics.median(ratios), OF_TORCH))


if __name__ == "__main__":
    main()
