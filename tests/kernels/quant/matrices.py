"""Matrices for tests of quantized ones, and when two of those are the same."""

import torch

from tests.kernels.where import DEVICE


def normal(*shape, seed=0, scale=0.02):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE)


def uneven(*shape, seed=0):
    """Numbers whose sizes differ by powers of ten from column to column, and a row of zeros."""
    sizes = 10 ** normal(shape[-1], seed=seed + 1, scale=1.0).clamp(-2, 2)
    weight = normal(*shape, seed=seed) * sizes
    weight[..., 1, :] = 0
    return weight


def same(one, other):
    assert (one.format, one.shape) == (other.format, other.shape)
    for name, mine in one.as_bytes().items():
        assert torch.equal(mine, other.as_bytes()[name]), name
