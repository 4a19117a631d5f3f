"""Operations that cost what they move: ours, the plain ones, others', and copying as many bytes.

Forward and backward. What all compute is compared first. Goals on a GPU: at least 0.85 of copying,
and nobody faster.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from penstock_kernels.op import INTERPRETED, Op
from tests.bench import peers
from tests.bench.figures import record
from tests.bench.timing import CUDA, Work, copying, machine, medians, processor_seconds, verdict

OF_COPYING, OF_PEERS = 0.85, 1.0
APART = 2e-2
"""Of norms: rounding in bfloat16."""


class Case(NamedTuple):
    """One operation."""

    op: Op[..., Any]
    given: Sequence[torch.Tensor]
    """What learns."""
    num_bytes: int
    """Read and written at least."""
    more: tuple[object, ...] = ()
    """What else it is called with."""
    draws: bool = False
    """Whether it draws, others draw otherwise, and a compiler finds nothing to fuse."""


class Asked(NamedTuple):
    """What the command line says."""

    tokens: int
    width: int
    dtype: torch.dtype


def asked(tokens: int, width: int, dry: tuple[int, int]) -> Asked:
    """Sizes, those of `--dry` where that is given; prints them and the machine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--width", type=int, default=width)
    parser.add_argument("--dry", action="store_true")
    told = parser.parse_args()
    sizes = dry if told.dry else (told.tokens, told.width)
    # Interpreted, arithmetic in bfloat16 is not to be trusted.
    found = Asked(*sizes, torch.float32 if told.dry else torch.bfloat16)
    if not CUDA:
        torch.set_num_threads(1)
    print(f"{machine()}, {found.tokens} tokens, width {found.width}, {found.dtype}")
    return found


def compare(name: str, case: Case, others: Mapping[str, peers.Function]) -> None:
    """Print one line."""
    ours = case.op.backend("triton") if INTERPRETED else case.op

    def plain(*x: torch.Tensor) -> Any:
        return case.op.reference(*x, *case.more)

    slopes = [torch.randn_like(y) for y in _several(plain(*case.given))]
    ways: dict[str, peers.Function] = {"ours": lambda *x: ours(*x, *case.more), "plain": plain}
    if not (INTERPRETED or case.draws):
        ways["compiled"] = torch.compile(plain)
    works = {who: _there_and_back(way, case.given, slopes) for who, way in ways.items()}
    found = {who: work() for who, work in works.items()}
    for who, function in others.items():
        work = _there_and_back(function, case.given, slopes)
        if (got := peers.result_of(f"{name} of {who}", work)) is not None:
            works[who] = work
            found |= {} if case.draws else {who: got}
    for who, got in found.items():
        for mine, theirs in zip(got, found["plain"], strict=True):
            off = (mine.double() - theirs.double()).norm() / theirs.double().norm()
            assert off < APART, f"{name}: {who} is {off:.1e} off"
    _tell(name, medians({**works, "copy": copying(case.num_bytes)}, processor_seconds))


def _tell(name: str, found: dict[str, float]) -> None:
    for who, spent in found.items():
        record(f"{name}, {who}", spent * 1e3, "ms")
    ratios = {who: spent / found["ours"] for who, spent in found.items() if who != "ours"}
    of_copying = ratios.pop("copy")
    told = ", ".join(f"{who}/ours {ratio:.2f}" for who, ratio in ratios.items())
    line = f"{name:18} {found['ours'] * 1e3:8.3f} ms, {told}"
    if CUDA:
        share = verdict(f"{name}: of copying", of_copying, OF_COPYING)
        best = verdict(f"{name}: best peer/ours", min(ratios.values()), OF_PEERS)
        line = f"{line}; {share}; {best}"
    print(line, flush=True)


def _there_and_back(
    function: peers.Function, given: Sequence[torch.Tensor], slopes: Sequence[torch.Tensor]
) -> Work:
    """Forward and backward. Some write over what they are given: all of it is each one's own."""
    inputs = [x.clone().requires_grad_() for x in given]
    slopes = [slope.clone() for slope in slopes]

    def work() -> list[torch.Tensor]:
        found = _several(function(*inputs))
        return [*found, *torch.autograd.grad(found, inputs, slopes)]

    return work


def _several(found: Any) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)
