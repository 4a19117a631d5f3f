"""The causal convolution, judged by its reference in fp64 and by transformers' functions."""

import random
from typing import Any

import pytest
import torch
from torch.library import opcheck

from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.causal_conv1d import causal_conv1d, decode_step, lean
from penstock_kernels.op import UnsupportedError
from tests.kernels.linear_attention.cases import error
from tests.kernels.where import DEVICE, needs_triton

pytestmark = pytest.mark.usefixtures("poisoned")

ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Of the largest element."""
BACKENDS = [
    ("reference", range(100)),
    ("lean", range(100)),
    pytest.param("triton", range(3), marks=needs_triton),
    pytest.param("triton", range(3, 102), marks=[needs_triton, pytest.mark.exhaustive]),
]


def drawn(seed):
    """x, weight, bias and initial states; lengths and activation; slopes."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = tuple(draw.choice((1, 2, 3, 4, 17, 40)) for _ in range(draw.randint(1, 5)))
    T, B, C, W = sum(lengths), len(lengths), draw.choice((1, 3, 8, 130)), draw.randint(2, 4)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE)

    bias = randn(C) if draw.random() < 0.5 else None
    initial = randn(B, W - 1, C) if draw.random() < 0.5 else None
    given = randn(T, C), randn(C, W), bias, initial
    activation = "silu" if draw.random() < 0.7 else None
    return given, lengths, activation, (randn(T, C), randn(B, W - 1, C))


def with_gradients(run, case, dtype):
    given, lengths, activation, slopes = case
    x, weight, bias, initial = (
        None if one is None else one.to(dtype).requires_grad_() for one in given
    )
    found = run(x, weight, bias, VarlenMetadata.of(lengths, DEVICE), activation, initial)
    learning = [one for one in (x, weight, bias, initial) if one is not None]
    return *found, *torch.autograd.grad(found, learning, [slope.to(dtype) for slope in slopes])


@pytest.mark.parametrize(("backend", "seeds"), BACKENDS)
def test_values_and_gradients_are_those_of_fp64_rounded(backend, seeds, monkeypatch):
    monkeypatch.setattr(lean, "BLOCK", 16)
    for seed in seeds:
        dtype = [*ROUNDING][seed % 3]
        if backend == "triton" and dtype == torch.float64:
            dtype = torch.float32
        given, *rest = drawn(seed)
        rounded = [None if x is None else x.to(dtype).double() for x in given]
        want = with_gradients(causal_conv1d.reference, (rounded, *rest), torch.float64)
        got = with_gradients(causal_conv1d.backend(backend), (rounded, *rest), dtype)
        for mine, exact in zip(got, want, strict=True):
            assert mine.dtype == dtype
            assert mine.shape == exact.shape
            assert error(mine, exact) < ROUNDING[dtype], seed


def test_the_reference_is_what_transformers_computes():
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    x, weight, bias = torch.randn(20, 6), torch.randn(6, 4), torch.randn(6)
    y, state = causal_conv1d.reference(x, weight, bias, VarlenMetadata.of((8, 12)), "silu")
    for document in (slice(0, 8), slice(8, 20)):
        want = qwen3_next.causal_conv1d_fn(x[document].t()[None], weight, bias, "silu")
        torch.testing.assert_close(y[document], want[0].t())
    more, next_state = decode_step(x[:2], weight, bias, state, "silu")
    cached = torch.cat((torch.zeros(2, 1, 6), state), dim=1).mT.contiguous()
    want = qwen3_next.causal_conv1d_update(x[:2, :, None], cached, weight, bias, "silu")
    torch.testing.assert_close(more, want[..., 0])
    torch.testing.assert_close(next_state, cached.mT[:, 1:])


def test_documents_continue_from_their_states():
    x, weight = torch.randn(20, 6), torch.randn(6, 4)
    y, last = causal_conv1d(x, weight, None, VarlenMetadata.of((20,)))
    head, state = causal_conv1d(x[:2], weight, None, VarlenMetadata.of((2,)))
    tail, state = causal_conv1d(x[2:], weight, None, VarlenMetadata.of((18,)), None, state)
    torch.testing.assert_close(torch.cat((head, tail)), y)
    torch.testing.assert_close(state, last)


def test_unsupported_inputs_are_refused():
    x, segments = torch.randn(5, 6), VarlenMetadata.of((5,))
    with pytest.raises(UnsupportedError, match="weight is"):
        causal_conv1d.backend("lean")(x, torch.randn(5, 4), None, segments)
    run: Any = causal_conv1d.backend("lean")
    with pytest.raises(UnsupportedError, match="activation is relu"):
        run(x, torch.randn(6, 4), None, segments, "relu")


@pytest.mark.parametrize(
    "operator", ["causal_conv1d_lean", pytest.param("causal_conv1d", marks=needs_triton)]
)
def test_pytorch_finds_no_fault_with_an_operator(operator):
    shapes = (5, 6), (6, 3), (6,), (2, 2, 6)
    given = [torch.randn(shape, device=DEVICE).requires_grad_() for shape in shapes]
    cu_seqlens = VarlenMetadata.of((1, 4), DEVICE).cu_seqlens
    opcheck(
        getattr(torch.ops.penstock, operator).default,
        (*given, cu_seqlens, True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_it_is_compiled_in_one_graph():
    case = drawn(7)
    run = torch.compile(causal_conv1d.backend("lean"), fullgraph=True, backend="aot_eager")
    want = with_gradients(causal_conv1d.backend("lean"), case, torch.float32)
    for mine, theirs in zip(with_gradients(run, case, torch.float32), want, strict=True):
        torch.testing.assert_close(mine, theirs)
