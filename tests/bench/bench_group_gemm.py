"""Grouped products of experts, ours in Triton against PyTorch's: needs a GPU.

`python tests/bench/bench_group_gemm.py [TOKENS]`

bfloat16, the two products of Qwen3-30B-A3B's experts (128 of them, 8 per token; 2048 wide, 768
inside), for TOKENS tokens (default 8192) spread evenly and as unevenly as a router does: forward,
the rows' gradient, the weights' gradient. Milliseconds are medians of five, of launches in turns;
QuACK is measured beside them where its package is installed. Goal: at least 0.9 times PyTorch's
speed.
"""

import statistics
import sys
from collections.abc import Callable

import torch

from penstock_kernels.group_gemm import group_gemm, native, quack
from penstock_kernels.group_gemm.autograd import Products
from penstock_kernels.op import HAS_TRITON

EXPERTS, PER_TOKEN, WIDTH, INNER = 128, 8, 2048, 768
SHAPES = {"gate and up": (2 * INNER, WIDTH), "down": (WIDTH, INNER)}
REPEATS, LAUNCHES = 5, 20
GOAL = 0.9


def counts_of(num_rows: int, spread: str) -> torch.Tensor:
    """Rows of each expert: the same for all, or drawn with weights that differ by powers."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.ones(EXPERTS)
    if spread == "uneven":
        weights = torch.randn(EXPERTS, generator=generator).exp()
    drawn = torch.multinomial(weights, num_rows, replacement=True, generator=generator)
    if spread == "even":
        drawn = torch.arange(num_rows) % EXPERTS
    return torch.bincount(drawn, minlength=EXPERTS)


def implementations() -> dict[str, Products]:
    """What is here to be measured, by name."""
    found = {"torch": native._PRODUCTS}
    if HAS_TRITON:
        from penstock_kernels.group_gemm import triton

        found["triton"] = triton._PRODUCTS
    if quack.MISSING is None:
        found["quack"] = quack._PRODUCTS
    else:
        print(f"quack: {quack.MISSING}")
    return found


def milliseconds(work: Callable[[], object]) -> float:
    """Of one launch, over some in a row, after the caches were filled with something else."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.empty(256 * 2**20, dtype=torch.int8, device="cuda").zero_()
    start.record()
    for _ in range(LAUNCHES):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / LAUNCHES


def compare(name: str, works: dict[str, Callable[[], torch.Tensor]], operations: float) -> float:
    """Print the medians of all, and return ours over PyTorch's speed."""
    results = {who: work() for who, work in works.items()}  # compiled, and warm
    for who, result in results.items():
        error = (result - results["torch"]).float().norm() / results["torch"].float().norm()
        assert error < 1e-2, f"{who} is {error:.1e} off"
    del results
    times: dict[str, list[float]] = {who: [] for who in works}
    for _ in range(REPEATS):
        for who, work in works.items():
            times[who].append(milliseconds(work))
    medians = {who: statistics.median(taken) for who, taken in times.items()}
    shown = ", ".join(
        f"{who} {taken:6.3f} ms ({operations / taken / 1e9:4.0f} TFLOP/s)"
        for who, taken in medians.items()
    )
    ratio = medians["torch"] / medians["triton"] if "triton" in medians else float("nan")
    print(f"{name:44} {shown}, triton/torch {ratio:.2f}")
    return ratio


def main() -> None:
    if not torch.cuda.is_available():
        print("grouped products are measured on a GPU, and there is none here")
        return
    num_rows = PER_TOKEN * int(sys.argv[1] if len(sys.argv) > 1 else 8192)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {num_rows} rows")
    found = implementations()
    ratios = []
    for spread in ("even", "uneven"):
        counts = counts_of(num_rows, spread).cuda()
        for shape, (N, K) in SHAPES.items():
            draw = torch.Generator("cuda").manual_seed(0)
            x, dy, weight = (
                torch.randn(size, generator=draw, device="cuda", dtype=torch.bfloat16)
                for size in ((num_rows, K), (num_rows, N), (EXPERTS, N, K))
            )
            refusal = group_gemm.fast["native"].refuses(x, weight, counts)
            assert refusal is None, refusal
            kinds = {
                "forward": lambda of, x=x, w=weight, c=counts: of.by_rows(x, w, c),
                "rows' gradient": lambda of, d=dy, w=weight, c=counts: of.by_rows(d, w.mT, c),
                "weights' gradient": lambda of, d=dy, x=x, c=counts: of.of_groups(d, x, c),
            }
            for kind, run in kinds.items():
                works = {
                    who: lambda run=run, products=products: run(products)
                    for who, products in found.items()
                }
                name = f"{spread}, {shape}, {kind}"
                ratios.append(compare(name, works, 2.0 * num_rows * N * K))
    print(
        f"triton/torch: least {min(ratios):.2f}, median {statistics.median(ratios):.2f};", end=" "
    )
    print(f"goal at least {GOAL}")


if __name__ == "__main__":
    main()
