"""Norms, gates and rotary embedding, ours and others': `python -m
tests.bench.kernels.bench_elementwise [--tokens T] [--width D] [--dry]`.

Forward and backward in bfloat16. Printed are milliseconds, how many times as long plain PyTorch,
`torch.compile` of it and, on a GPU, Liger-Kernel and QuACK take, and there also the share of the
speed at which memory is copied: of the bytes that have to be read and written at least. Goals are
in `side_by_side.py`.

On a CPU, where it is one thread's time that counts, norms have a gradient of their own, and the
other lines say what a compiler would gain. With `--dry` and `TRITON_INTERPRET=1` all of it runs on
a CPU, interpreted, at shapes that say nothing of speed.
"""

from typing import Any

import torch
from tests.bench import peers
from tests.bench.side_by_side import Asked, Case, asked, compare
from tests.bench.timing import CUDA, DEVICE

from penstock_kernels.clamped_swiglu import clamped_gate
from penstock_kernels.glu import geglu_tanh, swiglu
from penstock_kernels.op import Op
from penstock_kernels.rms_norm import add_rms_norm, rms_norm
from penstock_kernels.rope import rope

EPS, ALPHA, LIMIT, HEAD = 1e-6, 1.702, 7.0, 128
DRY = 3, 2 * HEAD


def cases(sizes: Asked, cos: torch.Tensor, sin: torch.Tensor) -> dict[str, Case]:
    """By name. Widths are those of a model: hidden states, heads, and features three times as
    many."""
    tokens, width, dtype = sizes
    rows, features = (tokens, width), (tokens, 3 * width)
    q, k = (tokens, width // HEAD, HEAD), (tokens, max(width // HEAD // 4, 1), HEAD)

    def case(
        op: Op[..., Any], shapes: tuple[tuple[int, ...], ...], passes: int, *more: object
    ) -> Case:
        """`passes`: how often the first of them, or as many bytes, is read or written at least."""
        given = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
        return Case(op, given, passes * given[0].nbytes, more)

    return {
        "rms_norm": case(rms_norm, (rows, (width,)), 5, EPS),
        "rms_norm of heads": case(rms_norm, (q, (HEAD,)), 5, EPS),
        "add_rms_norm": case(add_rms_norm, (rows, rows, (width,)), 8, EPS),
        "swiglu": case(swiglu, (features, features), 8),
        "geglu_tanh": case(geglu_tanh, (features, features), 8),
        "clamped_gate": case(clamped_gate, ((tokens, 6 * width),), 4, ALPHA, LIMIT),
        "rope": case(rope, (q, k), 5, cos, sin),
    }


def main() -> None:
    sizes = asked(32_768 if CUDA else 1024, 4096 if CUDA else 1024, DRY)
    peers.say_missing("liger", "quack")
    angle = torch.rand(sizes.tokens, HEAD // 2, device=DEVICE).repeat(1, 2)
    cos, sin = angle.cos().to(sizes.dtype), angle.sin().to(sizes.dtype)
    others = peers.elementwise(EPS, cos, sin)
    for name, case in cases(sizes, cos, sin).items():
        compare(name, case, others.get(name.removesuffix(" of heads"), {}))


if __name__ == "__main__":
    main()
