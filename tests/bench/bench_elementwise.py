"""Norms, gates and rotary embedding, ours and others': `python tests/bench/bench_elementwise.py
[--tokens T] [--width D] [--dry]`.

Forward and backward in bfloat16. Printed are milliseconds, how many times as long plain PyTorch,
`torch.compile` of it and, on a GPU, Liger-Kernel and QuACK take, and there also the share of the
speed at which memory is copied: of the bytes that have to be read and written at least. What all
compute is compared first.

Goals on a GPU: at least 0.85 of copying, and nobody faster. On a CPU, where it is one thread's time
that counts, norms have a gradient of their own, and the other lines say what a compiler would gain.
With `--dry` and `TRITON_INTERPRET=1` all of it runs on a CPU, interpreted, at shapes that say
nothing of speed.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import peers
import torch
from timing import CUDA, DEVICE, Work, copying, machine, medians, processor_seconds, verdict

from penstock_kernels.clamped_gate import clamped_gate
from penstock_kernels.glu import geglu_tanh, swiglu
from penstock_kernels.op import INTERPRETED, Op
from penstock_kernels.rms_norm import add_rms_norm, rms_norm
from penstock_kernels.rope import rope

EPS, ALPHA, LIMIT, HEAD = 1e-6, 1.702, 7.0, 128
OF_COPYING, OF_PEERS = 0.85, 1.0


class Case(NamedTuple):
    """One operation."""

    op: Op[..., Any]
    shapes: Sequence[tuple[int, ...]]
    """Of what learns."""
    passes: int
    """How often the first of them, or as many bytes, is read or written at least."""
    more: tuple[object, ...] = ()
    """What else it is called with."""


def cases(tokens: int, width: int, cos: torch.Tensor, sin: torch.Tensor) -> dict[str, Case]:
    """By name. Widths are those of a model: hidden states, heads, and features three times as
    many."""
    rows, features = (tokens, width), (tokens, 3 * width)
    q, k = (tokens, width // HEAD, HEAD), (tokens, max(width // HEAD // 4, 1), HEAD)
    return {
        "rms_norm": Case(rms_norm, (rows, (width,)), 5, (EPS,)),
        "rms_norm of heads": Case(rms_norm, (q, (HEAD,)), 5, (EPS,)),
        "add_rms_norm": Case(add_rms_norm, (rows, rows, (width,)), 8, (EPS,)),
        "swiglu": Case(swiglu, (features, features), 8),
        "geglu_tanh": Case(geglu_tanh, (features, features), 8),
        "clamped_gate": Case(clamped_gate, ((tokens, 6 * width),), 4, (ALPHA, LIMIT)),
        "rope": Case(rope, (q, k), 5, (cos, sin)),
    }


def there_and_back(
    function: peers.Function, given: Sequence[torch.Tensor], slopes: Sequence[torch.Tensor]
) -> Work:
    """Forward and backward. Some write over what they are given: all of it is each one's own."""
    inputs = [x.clone().requires_grad_() for x in given]
    slopes = [slope.clone() for slope in slopes]

    def work() -> list[torch.Tensor]:
        found = several(function(*inputs))
        return [*found, *torch.autograd.grad(found, inputs, slopes)]

    return work


def several(found: Any) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def compare(name: str, case: Case, others: dict[str, peers.Function], dtype: torch.dtype) -> None:
    """Print one line."""
    given = [torch.randn(shape, device=DEVICE).to(dtype) for shape in case.shapes]
    ours = case.op.backend("triton") if INTERPRETED else case.op

    def plain(*x: torch.Tensor) -> Any:
        return case.op.reference(*x, *case.more)

    slopes = [torch.randn_like(y) for y in several(plain(*given))]
    want = there_and_back(plain, given, slopes)()
    ways: dict[str, peers.Function] = {"ours": lambda *x: ours(*x, *case.more), "plain": plain}
    if not INTERPRETED:
        ways["compiled"] = torch.compile(plain)
    works: dict[str, Work] = {}
    for who, function in {**ways, **others}.items():
        work = there_and_back(function, given, slopes)
        got = work() if who in ways else peers.result_of(f"{name} of {who}", work)
        if got is None:
            continue
        works[who] = work
        for mine, theirs in zip(got, want, strict=True):
            off = (mine.double() - theirs.double()).norm() / theirs.double().norm()
            assert off < 2e-2, f"{who} is {off:.1e} off"
    num_bytes = case.passes * given[0].numel() * given[0].element_size()
    found = medians({**works, "copy": copying(num_bytes)}, processor_seconds)
    ratios = {who: found[who] / found["ours"] for who in works if who != "ours"}
    told = ", ".join(f"{who}/ours {ratio:.2f}" for who, ratio in ratios.items())
    line = f"{name:18} {found['ours'] * 1e3:8.3f} ms, {told}"
    if CUDA:
        share = verdict("of copying", found["copy"] / found["ours"], OF_COPYING)
        line = f"{line}; {share}; {verdict('best peer/ours', min(ratios.values()), OF_PEERS)}"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=32_768 if CUDA else 1024)
    parser.add_argument("--width", type=int, default=4096 if CUDA else 1024)
    parser.add_argument("--dry", action="store_true")
    asked = parser.parse_args()
    tokens, width = (3, 2 * HEAD) if asked.dry else (asked.tokens, asked.width)
    # Interpreted, arithmetic in bfloat16 is not to be trusted.
    dtype = torch.float32 if asked.dry else torch.bfloat16
    if not CUDA:
        torch.set_num_threads(1)
    print(f"{machine()}, {tokens} tokens, width {width}, {dtype}")
    peers.say_missing("liger", "quack")
    angle = torch.rand(tokens, HEAD // 2, device=DEVICE).repeat(1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    others = peers.elementwise(EPS, cos, sin)
    for name, case in cases(tokens, width, cos, sin).items():
        compare(name, case, others.get(name.removesuffix(" of heads"), {}), dtype)


if __name__ == "__main__":
    main()
