"""Random inputs of linear attention."""

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from penstock_kernels.attention import VarlenMetadata
from tests.kernels.where import DEVICE

LENGTHS = (1, 2, 7, 31, 32, 33, 63, 64, 65, 100, 130)


@dataclass(frozen=True)
class Case:
    """Arguments of the operation, with slopes of its results."""

    lengths: tuple[int, ...]
    tensors: tuple[Any, ...]
    """q, k, v, log_decay, beta and initial_state."""
    slopes: tuple[torch.Tensor, torch.Tensor]
    scale: float

    def with_gradients(self, run, dtype=torch.float64):
        """Outputs, final states, and gradients of all that is given."""
        kinds = (dtype, dtype, dtype, None, dtype, None)
        wide = torch.promote_types(dtype, torch.float32)
        q, k, v, log_decay, beta, initial = (
            None if x is None else x.to(kind or wide).requires_grad_()
            for x, kind in zip(self.tensors, kinds, strict=True)
        )
        segments = VarlenMetadata.of(self.lengths, DEVICE)
        found = run(q, k, v, log_decay, beta, segments, self.scale, initial)
        learning = [x for x in (q, k, v, log_decay, beta, initial) if x is not None]
        slopes = [slope.to(y.dtype) for slope, y in zip(self.slopes, found, strict=True)]
        return *found, *torch.autograd.grad(found, learning, slopes)

    def rounded(self, dtype):
        """With inputs that a dtype can hold."""
        return replace(
            self, tensors=tuple(None if x is None else x.to(dtype).double() for x in self.tensors)
        )


def drawn(seed, widths=(1, 2, 3, 8, 17, 33), documents=4, channels=None, lengths=LENGTHS):
    """Keys are of length 1, as in models: longer ones make the delta rule's states grow."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    some = tuple(draw.choice(lengths) for _ in range(draw.randint(1, documents)))
    T, G = sum(some), draw.choice((1, 2))
    N, K, V = G * draw.choice((1, 2, 3)), draw.choice(widths), draw.choice(widths)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE)

    def rand(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(DEVICE)

    q, k = (F.normalize(randn(T, G, K), dim=-1) for _ in range(2))
    channels = draw.random() < 0.5 if channels is None else channels
    log_decay = -rand(*((T, N, K) if channels else (T, N))) * draw.choice((0.01, 1, 30))
    beta = 2 * rand(T, N) if draw.random() < 0.6 else None
    initial = randn(len(some), N, K, V) if draw.random() < 0.5 else None
    slopes = randn(T, N, V), randn(len(some), N, K, V)
    return Case(some, (q, k, randn(T, N, V), log_decay, beta, initial), slopes, 0.3)


def error(mine, exact):
    """Of the largest element, or of 1 where all are smaller."""
    if not exact.numel():
        return 0.0
    mine, exact = mine.detach().double(), exact.detach().double()
    return float((mine - exact).abs().max() / exact.abs().max().clamp(min=1))
