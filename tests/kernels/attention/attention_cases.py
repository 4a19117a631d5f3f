"""Random cases of attention: documents of one token, of primes, of many; heads of every grouping;
windows, sinks, soft caps, and start rows or bidirectional runs, each in some."""

import random
from dataclasses import dataclass
from itertools import pairwise

import torch

from penstock_kernels.attention import VarlenMetadata
from tests.turns import hundred

LENGTHS = (1, 1, 2, 3, 7, 13, 16, 17, 31, 37, 61, 64, 101)
HUNDRED = hundred(8)
"""Numbers of cases: a few, and the others of a hundred where there is time."""
HEADS = ((1, 1), (4, 2), (6, 2), (5, 5), (8, 1))


@dataclass(frozen=True)
class Case:
    """What is attended to, how, and with which numbers."""

    lengths: list[int]
    heads: tuple[int, int]
    width: int
    window: int | None
    has_sinks: bool
    soft_cap: float | None
    start_rows: list[int] | None
    bidirectional: list[tuple[int, int]]
    seed: int

    @property
    def scale(self):
        return self.width**-0.5

    @property
    def masks(self):
        return {"start_rows": self.start_rows, "bidirectional": self.bidirectional}

    def tensors(self, dtype=torch.float64):
        """q, k, v, dy, and sinks or None."""
        generator = torch.Generator().manual_seed(self.seed)
        query, key = self.heads
        sizes = [(sum(self.lengths), heads, self.width) for heads in (query, key, key, query)]
        parts = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in sizes]
        # Halves, which every dtype holds.
        sinks = torch.randint(-4, 5, (query,), generator=generator).to(dtype) / 2
        return *parts, sinks if self.has_sinks else None

    def with_gradients(self, attend, dtype=torch.float64, **settings):
        """y, dq, dk, dv, and dsinks if there are sinks, of one of attention's backends."""
        q, k, v, dy, sinks = self.tensors(dtype)
        given = [part.requires_grad_() for part in (q, k, v, sinks) if part is not None]
        segments = VarlenMetadata.of(self.lengths, **self.masks)
        more = given[3] if self.has_sinks else None
        y = attend(*given[:3], segments, self.scale, self.window, more, self.soft_cap, **settings)
        return [y.detach(), *torch.autograd.grad(y, given, dy)]


def drawn(seed, *, sinks=True, soft_caps=True, masks=True):
    """The case of this number, without what is not asked for."""
    draw = random.Random(seed)
    lengths = [draw.choice(LENGTHS) for _ in range(draw.choice((1, 1, 2, 3, 5)))]
    case = {
        "lengths": lengths,
        "heads": draw.choice(HEADS),
        "width": draw.choice((8, 16, 24)),
        "window": draw.choice((None, None, 1, 5, 16, 33, 200)),
        "has_sinks": draw.random() < 0.3,
        "soft_cap": draw.choice((None, None, 1.5)),
        "start_rows": random_start_rows(draw, lengths) if draw.random() < 0.4 else None,
    }
    case["has_sinks"] &= sinks
    case["soft_cap"] = case["soft_cap"] if soft_caps else None
    case["start_rows"] = case["start_rows"] if masks else None
    has_runs = masks and case["start_rows"] is None and draw.random() < 0.5
    runs = random_runs(draw, lengths) if has_runs else []
    return Case(**case, bidirectional=runs, seed=seed)


def random_runs(draw, lengths):
    """Bidirectional runs, some next to one another, some of one token."""
    runs, first = [], 0
    for length in lengths:
        cuts = sorted({draw.randint(0, length) for _ in range(draw.randint(2, 6))})
        runs += [(first + a, first + b) for a, b in pairwise(cuts) if draw.random() < 0.6]
        first += length
    return runs


def random_start_rows(draw, lengths):
    """For each token any later one, its document's end, or one far beyond."""
    rows, first = [], 0
    for length in lengths:
        end = first + length
        rows += [
            draw.choice((draw.randint(token + 1, end), end, end + 1000))
            for token in range(first, end)
        ]
        first = end
    return rows


def of_shared_prompts(groups):
    """Lengths and start rows of prompts, each with two answers that do not see each other."""
    lengths, rows, first = [], [], 0
    for prompt, chosen, rejected in groups:
        end = first + prompt + chosen + rejected
        rows += [end] * prompt + [first + prompt + chosen] * chosen + [end] * rejected
        lengths.append(prompt + chosen + rejected)
        first = end
    return lengths, rows
