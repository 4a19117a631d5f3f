"""Linear attention on one CPU thread, ours and transformers' PyTorch implementation: `python -m
tests.bench.kernels.bench_linear_attention [--lengths L ...] [--heads N] [--width K]`.

Forward and backward in float32, by default of as many heads as Qwen3-Next has. transformers'
functions know no documents' borders: they are called for each document. Runs alternate; printed are
milliseconds, and how many times as long transformers takes. The goal is 2.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tests.bench.figures import record
from tests.bench.timing import Work, machine, medians, processor_seconds
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.linear_attention import linear_attention

GOAL = 2.0
APART = 1e-4
LENGTHS = (700, 300, 64, 200, 90, 500, 33, 161)

Function = Callable[..., torch.Tensor]


def gated_delta_rule(*inputs: torch.Tensor) -> torch.Tensor:
    """transformers' of one document."""
    return qwen3_next.torch_chunk_gated_delta_rule(*(x[None] for x in inputs))[0][0]


def kimi_delta_attention(*inputs: torch.Tensor) -> torch.Tensor:
    """transformers' of one document."""
    q, k, v, g, beta = (x[None] for x in inputs)
    return kimi_linear.chunk_kimi_delta_attention(q, k, v, g, beta)[0][0]


def by_documents(function: Function, lengths: Sequence[int]) -> Function:
    """Called for each document."""

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        documents = zip(*(x.split(list(lengths)) for x in inputs), strict=True)
        return torch.cat([function(*one) for one in documents])

    return run


def there_and_back(function: Function, inputs: Sequence[torch.Tensor], dy: torch.Tensor) -> Work:
    """Forward and backward."""
    leaves = [x.clone().requires_grad_() for x in inputs]

    def work() -> list[torch.Tensor]:
        y = function(*leaves)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    return work


def main() -> None:
    """Print a line for each kind of linear attention; fails where results differ."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    segments = VarlenMetadata.of(options.lengths)
    tokens = segments.num_tokens
    print(f"{machine()}, documents of {options.lengths}, heads {options.width} wide")
    scale = options.width**-0.5

    run: Callable[..., Any] = linear_attention

    def ours(*inputs: Any) -> torch.Tensor:
        return run(*inputs, segments=segments, scale=scale)[0]

    for name, theirs, heads, channels in (
        ("gated delta rule", gated_delta_rule, options.heads, ()),
        # Of few heads, as transformers takes seconds.
        (
            "Kimi Delta Attention",
            kimi_delta_attention,
            max(1, options.heads // 16),
            (options.width,),
        ),
    ):
        q, k, v, dy = (torch.randn(tokens, heads, options.width) for _ in range(4))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        log_decay = -torch.rand(tokens, heads, *channels) * 0.1
        inputs = q, k, v, log_decay, torch.rand(tokens, heads)
        timed = {
            "ours": there_and_back(ours, inputs, dy),
            "transformers": there_and_back(by_documents(theirs, options.lengths), inputs, dy),
        }
        for mine, other in zip(*(work() for work in timed.values()), strict=True):
            assert (mine - other).norm() < APART * other.norm(), name
        seconds = medians(timed, processor_seconds)
        for implementation, median in seconds.items():
            record(f"{name}, {implementation}", median * 1e3, "ms")
        ratio = seconds["transformers"] / seconds["ours"]
        record(f"{name}: transformers/ours", ratio, goal=GOAL)
        milliseconds = f"{seconds['ours'] * 1e3:.1f} ms"
        print(f"{name}, {heads} heads: {milliseconds}, transformers/ours {ratio:.2f} (goal {GOAL})")


if __name__ == "__main__":
    main()
