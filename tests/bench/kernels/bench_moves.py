"""What moves rows and drops features: `python -m tests.bench.kernels.bench_moves [--tokens T]
[--width D] [--dry]`.

Sorting tokens by expert, adding up what the experts made of them, and dropout by counter, forward
and backward in bfloat16, at the width of Qwen3-30B-A3B: 2048, 8 of 128 experts for each token.
Printed are milliseconds, how many times as long the plain operations and `torch.compile` of them
take (of dropout PyTorch's own, whose draws depend on the layout), and on a GPU the share of the
speed at which memory is copied: of the bytes that have to be read and written at least. Goals are
in `side_by_side.py`.

With `--dry` and `TRITON_INTERPRET=1` it runs on a CPU, interpreted, at a shape that says nothing of
speed.
"""

from functools import partial

import torch
import torch.nn.functional as F
from tests.bench.side_by_side import Asked, Case, asked, compare
from tests.bench.timing import CUDA, DEVICE

from penstock_kernels.dropout import dropout
from penstock_kernels.permute import permute, sort_by_expert, unpermute

WIDTH, EXPERTS, PER_TOKEN, RATE = 2048, 128, 8, 0.1
DRY = 3, 24


def cases(sizes: Asked) -> dict[str, Case]:
    """By name."""
    tokens, width, dtype = sizes
    draw = torch.Generator(DEVICE).manual_seed(0)
    x, rows = (
        torch.randn(count, width, generator=draw, device=DEVICE).to(dtype)
        for count in (tokens, tokens * PER_TOKEN)
    )
    scores = torch.rand(tokens, EXPERTS, generator=draw, device=DEVICE)
    weights, choice = scores.topk(PER_TOKEN)
    order = sort_by_expert(choice, EXPERTS)
    places = torch.arange(tokens, device=DEVICE)
    return {
        # Tokens are read and their copies written, and the other way round.
        "permute": Case(permute, (x,), 2 * (1 + PER_TOKEN) * x.nbytes, (order,)),
        # The same, and copies are read once more for the gradients of weights.
        "unpermute": Case(unpermute, (rows, weights), (2 + 3 * PER_TOKEN) * x.nbytes, (order,)),
        "dropout": Case(dropout, (x,), 4 * x.nbytes, (places, RATE, 7), draws=True),
    }


def main() -> None:
    sizes = asked(16_384 if CUDA else 1024, WIDTH, DRY)
    for name, case in cases(sizes).items():
        compare(name, case, {"torch": partial(F.dropout, p=RATE)} if case.draws else {})


if __name__ == "__main__":
    main()
