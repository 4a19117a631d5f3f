"""What moves rows and drops features: `python tests/bench/bench_moves.py [--tokens T] [--dry]`.

Sorting tokens by expert, adding up what the experts made of them, and dropout by counter, forward
and backward in bfloat16, at the width of Qwen3-30B-A3B: 2048, 8 of 128 experts for each token.
Printed are milliseconds, how many times as long the plain operations and `torch.compile` of them
take (of dropout also PyTorch's own, whose draws depend on the layout), and on a GPU the share of
the speed at which memory is copied: of the bytes that have to be read and written at least. What
all compute is compared first.

Goals on a GPU: at least 0.85 of copying, and nobody faster. With `--dry` and `TRITON_INTERPRET=1`
it runs on a CPU, interpreted, at a shape that says nothing of speed.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from timing import CUDA, DEVICE, Work, copying, machine, medians, processor_seconds, verdict

from penstock_kernels.dropout import dropout
from penstock_kernels.op import INTERPRETED
from penstock_kernels.permute import order_of, permute, unpermute

WIDTH, EXPERTS, PER_TOKEN, RATE = 2048, 128, 8, 0.1
OF_COPYING, OF_PEERS = 0.85, 1.0

Way = Callable[..., torch.Tensor]


def there_and_back(way: Way, given: Sequence[torch.Tensor]) -> Work:
    """Forward, and backward from a slope of ones."""
    inputs = [x.clone().requires_grad_() for x in given]

    def work() -> tuple[torch.Tensor, ...]:
        y = way(*inputs)
        return y, *torch.autograd.grad(y, inputs, torch.ones_like(y))

    return work


def compare(
    name: str,
    ways: Mapping[str, Way],
    given: Sequence[torch.Tensor],
    moved: int,
    drawing_apart: Mapping[str, Way],
) -> None:
    """Print one line; `moved` are the bytes that cannot be fewer."""
    works = {who: there_and_back(way, given) for who, way in ways.items()}
    want = works["plain"]()
    for who, work in works.items():
        for mine, plain in zip(work(), want, strict=True):
            off = (mine.double() - plain.double()).norm() / plain.double().norm()
            assert off < 2e-2, f"{name}: {who} is {off:.1e} off"
    works |= {who: there_and_back(way, given) for who, way in drawing_apart.items()}
    found = medians({**works, "copy": copying(moved)}, processor_seconds)
    ratios = {who: found[who] / found["ours"] for who in works if who != "ours"}
    told = ", ".join(f"{who}/ours {ratio:.2f}" for who, ratio in ratios.items())
    line = f"{name:10} {found['ours'] * 1e3:8.3f} ms, {told}"
    if CUDA:
        share = verdict("of copying", found["copy"] / found["ours"], OF_COPYING)
        line = f"{line}; {share}; {verdict('best peer/ours', min(ratios.values()), OF_PEERS)}"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=16_384 if CUDA else 1024)
    parser.add_argument("--dry", action="store_true")
    asked = parser.parse_args()
    tokens, width = (3, 24) if asked.dry else (asked.tokens, WIDTH)
    # Interpreted, arithmetic in bfloat16 is not to be trusted.
    dtype = torch.float32 if asked.dry else torch.bfloat16
    if not CUDA:
        torch.set_num_threads(1)
    print(f"{machine()}, {tokens} tokens, width {width}, {dtype}")
    draw = torch.Generator(DEVICE).manual_seed(0)
    x, rows = (
        torch.randn(count, width, generator=draw, device=DEVICE).to(dtype)
        for count in (tokens, tokens * PER_TOKEN)
    )
    scores = torch.rand(tokens, EXPERTS, generator=draw, device=DEVICE)
    weights, choice = scores.topk(PER_TOKEN)
    order = order_of(choice, EXPERTS)
    places = torch.arange(tokens, device=DEVICE)
    row = tokens * width * dtype.itemsize
    cases = {
        # Tokens are read and their copies written, and the other way round.
        "permute": (permute, (x,), (order,), 2 * (1 + PER_TOKEN) * row),
        # The same, and copies are read once more for the gradients of weights.
        "unpermute": (unpermute, (rows, weights), (order,), (2 + 3 * PER_TOKEN) * row),
        "dropout": (dropout, (x,), (places, RATE, 7), 4 * row),
    }
    for name, (op, given, more, moved) in cases.items():
        ours = op.backend("triton") if INTERPRETED else op
        ways: dict[str, Way] = {
            "ours": partial(_called, ours, more),
            "plain": partial(_called, op.reference, more),
        }
        if not INTERPRETED and name != "dropout":
            ways["compiled"] = torch.compile(ways["plain"])
        torch_own = {"torch": partial(F.dropout, p=RATE)} if name == "dropout" else {}
        compare(name, ways, given, moved, torch_own)


def _called(way: Way, more: Sequence[object], *given: torch.Tensor) -> torch.Tensor:
    return way(*given, *more)


if __name__ == "__main__":
    main()
