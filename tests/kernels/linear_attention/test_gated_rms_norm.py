"""The gated norm, judged by its definition in fp64 and by transformers' modules."""

import random

import pytest
import torch
from torch.library import opcheck

from penstock_kernels.gated_rms_norm import gated_rms_norm
from penstock_kernels.op import UnsupportedError
from tests.kernels.linear_attention.cases import error
from tests.kernels.where import DEVICE, needs_triton

pytestmark = pytest.mark.usefixtures("poisoned")

ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
"""Of the largest element."""
BACKENDS = [
    ("reference", range(100)),
    ("lean", range(100)),
    pytest.param("triton", range(12), marks=needs_triton),
    pytest.param("triton", range(12, 100), marks=[needs_triton, pytest.mark.exhaustive]),
]


def exact_norm(x, gate, weight, eps, activation, norm_first, groups):
    gate = gate.sigmoid() * (gate if activation == "silu" else 1)
    parts = (x if norm_first else x * gate).unflatten(-1, (groups, -1))
    normed = (parts / (parts.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2)
    return normed * weight * (gate if norm_first else 1)


@pytest.mark.parametrize(("backend", "seeds"), BACKENDS)
def test_values_and_gradients_are_those_of_fp64_rounded(backend, seeds):
    for seed in seeds:
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        dtype, groups = draw.choice([*ROUNDING]), draw.choice((1, 1, 2, 3))
        shape = (draw.choice((0, 1, 2, 7, 40)), groups * draw.choice((1, 3, 8, 65)))
        how = 1e-5, draw.choice(("silu", "sigmoid")), draw.random() < 0.5, groups
        shapes = shape, shape, shape[1:], shape
        *given, slope = (torch.randn(s, generator=generator).to(DEVICE, dtype) for s in shapes)

        def with_gradients(run, dtype, given=given, slope=slope, how=how):
            inputs = [x.to(dtype).requires_grad_() for x in given]
            y = run(*inputs, *how)
            return y, *torch.autograd.grad(y, inputs, slope.to(dtype))

        want = with_gradients(exact_norm, torch.float64)
        got = with_gradients(gated_rms_norm.backend(backend), dtype)
        for mine, exact in zip(got, want, strict=True):
            assert mine.dtype == dtype
            assert error(mine, exact) < ROUNDING[dtype], seed


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_the_reference_is_what_transformers_computes(dtype):
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    x, gate = (torch.randn(5, 12).to(dtype) for _ in range(2))
    weight = torch.randn(12).to(dtype)
    of_qwen, of_mamba = Qwen3NextRMSNormGated(12), MambaRMSNormGated(12, 4)
    of_qwen.weight.data = of_mamba.weight.data = weight
    assert torch.equal(gated_rms_norm.reference(x, gate, weight, 1e-6), of_qwen(x, gate))
    got = gated_rms_norm.reference(x, gate, weight, 1e-6, norm_first=False, groups=3)
    assert torch.equal(got, of_mamba(x, gate))


def test_unsupported_inputs_are_refused():
    x, weight = torch.randn(5, 6), torch.randn(6)
    with pytest.raises(UnsupportedError, match="groups"):
        gated_rms_norm.backend("lean")(x, x, weight, 1e-6, groups=4)
    with pytest.raises(UnsupportedError, match="gate is"):
        gated_rms_norm.backend("lean")(x, x[:3], weight, 1e-6)


@needs_triton
def test_pytorch_finds_no_fault_with_the_operator():
    given = [torch.randn(shape, device=DEVICE).requires_grad_() for shape in ((3, 6), (3, 6), (6,))]
    opcheck(torch.ops.penstock.gated_rms_norm.default, (*given, 1e-6, True, False, 2))
