"""Quantized matrices of a hundred random shapes: numbers by their plain definition, kernels as the
reference to the bit, products and their gradients as those of the numbers, noise."""

import random

import numpy as np
import pytest
import torch

from penstock_kernels.noise import RowKeys, add_noise_
from penstock_kernels.quant import (
    FORMATS,
    QuantizedTensor,
    dequantize,
    group_linear,
    linear,
    matmul,
    quantize,
    step_size,
)
from tests.kernels.quant.matrices import normal, same, uneven
from tests.kernels.quant.test_quant import plain
from tests.kernels.where import CAN_RUN_TRITON, DEVICE
from tests.turns import hundred

pytestmark = pytest.mark.usefixtures("poisoned")

ROWS = (1, 2, 3, 5, 7, 16, 17, 131)
COLUMNS = (1, 2, 3, 15, 16, 17, 31, 63, 64, 65, 97, 128, 129, 257)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Products. fp32: sums of up to 257 numbers; 16 bits: one rounding of the result.
PRODUCT = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}

cases = pytest.mark.parametrize("seeds", hundred(12))
"""Each format in turn."""


def case(seed):
    """A format, a stack of matrices or one, and a dtype."""
    draw = random.Random(seed)
    stack = draw.choice(((), (), (1,), (2,), (3,)))
    rows = draw.choice(ROWS[:4] if stack else ROWS)
    columns = draw.choice(COLUMNS)
    # A row of zeros is the second.
    weight = (uneven if rows > 1 else normal)(*stack, rows, columns, seed=seed)
    return draw, FORMATS[sorted(FORMATS)[seed % len(FORMATS)]], weight.to(draw.choice(DTYPES))


def backends(op):
    return [name for name in op.backends[1:] if name != "triton" or CAN_RUN_TRITON]


@cases
def test_numbers_are_those_of_the_plain_definition_and_kernels_agree_to_the_bit(seeds):
    for seed in seeds:
        draw, kept, weight = case(seed)
        made, dtype = quantize.reference(weight, kept), draw.choice(DTYPES)
        numbers = dequantize.reference(made, torch.float32)
        matrices = (each.view(-1, *weight.shape[-2:]) for each in (weight, numbers))
        for matrix, found in zip(*matrices, strict=True):
            want, gap = plain(matrix, kept.name)
            off = np.abs(found.double().cpu().numpy() - want)
            ties = off > 1e-6 * np.abs(want) + 1e-18
            # 16 bits hold many numbers that are a tie exactly, and which side it falls on is free.
            assert (off <= gap * 1.001 + 1e-18)[ties].all(), seed
        for backend in backends(quantize):
            same(quantize.backend(backend)(weight, kept), made)
        for backend in backends(dequantize):
            got = dequantize.backend(backend)(made, dtype)
            assert torch.equal(got, dequantize.reference(made, dtype)), (seed, backend)


@cases
def test_products_and_gradients_are_those_of_the_numbers(seeds):
    for seed in seeds:
        draw, kept, weight = case(seed)
        made, dtype = quantize(weight, kept), draw.choice(DTYPES)
        exact = dequantize(made, dtype).double()
        rows = draw.choice((0, 1, 2, 5, 17))
        x = normal(rows, made.columns, seed=seed, scale=1.0).to(dtype).requires_grad_()

        def check(y, want, what, x=x, dtype=dtype):
            close(y, want, dtype, what)
            dy = normal(*y.shape, seed=1, scale=1.0).to(dtype)
            (slope,) = torch.autograd.grad(want, x, dy.double(), retain_graph=True)
            if y.requires_grad:
                close(torch.autograd.grad(y, x, dy)[0], slope, dtype, what)

        # Rows of all matrices of a stack are those of one.
        parts = {name: tensor.flatten(0, -2) for name, tensor in made.tensors.items()}
        whole = QuantizedTensor(kept, made.columns, **parts)
        want = x.double() @ exact.flatten(0, -2).mT
        for backend in backends(matmul):
            if DEVICE == "cuda" and backend == "triton" and dtype == torch.float32:
                continue  # on a GPU it multiplies rows of 16 bits alone
            check(matmul.backend(backend)(x.detach(), whole), want, (seed, backend))
        check(linear(x, whole), want, (seed, "linear"))
        if len(made.shape) == 3:
            at = sorted(draw.randint(0, rows) for _ in range(made.shape[0] - 1))
            counts = torch.tensor([0, *at, rows], device=DEVICE).diff()
            group = torch.repeat_interleave(counts)
            want = torch.einsum("tk,tnk->tn", x.double(), exact[group])
            check(group_linear(x, made, counts), want, (seed, "group_linear"))


def close(got, want, dtype, what):
    assert (got.shape, got.dtype) == (want.shape, dtype)
    limit = PRODUCT[dtype] * (want.abs().max() if want.numel() else 1)
    assert bool(((got.double() - want).abs() <= 2 * limit).all()), what


@pytest.mark.skipif(not CAN_RUN_TRITON, reason="needs CUDA or Triton's interpreter")
@cases
def test_kernels_add_the_noise_of_the_reference_at_any_shape(seeds):
    for seed in seeds:
        draw, kept, weight = case(seed)
        made, dtype = quantize(weight, kept), draw.choice(DTYPES)
        total = made.codes.shape[:-1].numel()
        at = sorted(draw.randint(0, total) for _ in range(draw.randint(0, 3)))
        runs = [
            RowKeys(end - start, draw.getrandbits(64), draw.getrandbits(34))
            for start, end in zip((0, *at), (*at, total), strict=True)
        ]
        first = draw.randint(0, 9) * (kept.group or 1)
        before = dequantize(made, dtype)
        found = [
            add_noise_.backend(name)(before.clone(), made, 0.7, runs, first).double()
            for name in ("triton", "reference")
        ]
        # Logarithms and cosines differ in their last bits, and so does what is rounded by a hair.
        rtol = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
        step = step_size(made)
        step = step if kept.group is None else step.repeat_interleave(kept.group, -1)
        limit = 3e-6 * step[..., : made.columns] + rtol * found[1].abs() + 2**-24
        assert bool(((found[0] - found[1]).abs() <= limit).all()), seed
