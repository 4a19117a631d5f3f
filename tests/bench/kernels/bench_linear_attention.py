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


def gated_delta_rule(*given: torch.Tensor) -> torch.Tensor:
    """transformers' of one document."""
    return qwen3_next.torch_chunk_gated_delta_rule(*(x[None] for x in given))[0][0]


def kimi_delta_attention(*given: torch.Tensor) -> torch.Tensor:
    """transformers' of one document."""
    q, k, v, g, beta = (x[None] for x in given)
    return kimi_linear.chunk_kimi_delta_attention(q, k, v, g, beta)[0][0]


def by_documents(function: Function, lengths: Sequence[int]) -> Function:
    """Called for each document."""

    def run(*given: torch.Tensor) -> torch.Tensor:
        documents = zip(*(x.split(list(lengths)) for x in given), strict=True)
        return torch.cat([function(*one) for one in documents])

    return run


def there_and_back(function: Function, given: Sequence[torch.Tensor], dy: torch.Tensor) -> Work:
    """Forward and backward."""
    inputs = [x.clone().requires_grad_() for x in given]

    def work() -> list[torch.Tensor]:
        y = function(*inputs)
        return [y, *torch.autograd.grad(y, inputs, dy)]

    return work


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    told = parser.parse_args()
    torch.set_num_threads(1)
    segments = VarlenMetadata.of(told.lengths)
    tokens = segments.num_tokens
    print(f"{machine()}, documents of {told.lengths}, heads {told.width} wide")
    scale = told.width**-0.5

    run: Callable[..., Any] = linear_attention

    def ours(*given: Any) -> torch.Tensor:
        return run(*given, segments=segments, scale=scale)[0]

    for name, theirs, heads, channels in (
        ("gated delta rule", gated_delta_rule, told.heads, ()),
        # Of few heads, as transformers takes seconds.
        ("Kimi Delta Attention", kimi_delta_attention, max(1, told.heads // 16), (told.width,)),
    ):
        q, k, v, dy = (torch.randn(tokens, heads, told.width) for _ in range(4))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        log_decay = -torch.rand(tokens, heads, *channels) * 0.1
        given = q, k, v, log_decay, torch.rand(tokens, heads)
        works = {
            "ours": there_and_back(ours, given, dy),
            "transformers": there_and_back(by_documents(theirs, told.lengths), given, dy),
        }
        for mine, other in zip(*(work() for work in works.values()), strict=True):
            assert (mine - other).norm() < APART * other.norm(), name
        found = medians(works, processor_seconds)
        for who, spent in found.items():
            record(f"{name}, {who}", spent * 1e3, "ms")
        ratio = found["transformers"] / found["ours"]
        record(f"{name}: transformers/ours", ratio, goal=GOAL)
        spent = f"{found['ours'] * 1e3:.1f} ms"
        print(f"{name}, {heads} heads: {spent}, transformers/ours {ratio:.2f} (goal {GOAL})")


if __name__ == "__main__":
    main()
