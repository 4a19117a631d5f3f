"""Attention in a compiled program: one operator, and one program for documents of all lengths."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.library import opcheck

from penstock_kernels.attention import VarlenMetadata, attention
from tests.kernels.attention.attention_cases import drawn

sdpa = attention.backend("sdpa")
PACKINGS = ([16], [8, 8], [3, 5, 8], [1, 2, 13], [7, 9], [1] * 16, [15, 1], [4, 4, 4, 4])


def layer(q, k, v, segments, window, sinks):
    """What lies around attention in a layer."""
    return sdpa(q * 2, k, v, segments, 0.25, window, sinks) + q


def tensors(tokens):
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (
        torch.randn(tokens, heads, 8, generator=generator).requires_grad_() for heads in (4, 2, 2)
    )
    return q, k, v


@pytest.mark.parametrize("window", [None, 4])
def test_documents_of_other_lengths_need_no_other_program(window):
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    for lengths in PACKINGS:
        given = tensors(sum(lengths))
        settings = VarlenMetadata.of(lengths), window, sinks
        got, want = compiled(*given, *settings), layer(*given, *settings)
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)
    # A number that has changed once is no constant of the second one.
    assert counter.frame_count <= 2
    for lengths in ([20, 1, 3], [5], [100, 7]):
        given = tensors(sum(lengths))
        compiled(*given, VarlenMetadata.of(lengths), window, sinks)
    assert counter.frame_count <= 3


@pytest.mark.parametrize(
    "seed", [105, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (4, 101))]
)
def test_gradients_of_the_operator_are_those_of_the_reference(seed):
    case = drawn(seed, soft_caps=False)
    want = case.with_gradients(attention.backend("eager"))

    def traced(*arguments):
        return torch.compile(sdpa, backend="aot_eager", fullgraph=True)(*arguments)

    got = case.with_gradients(traced)
    torch.testing.assert_close(got, want, atol=1e-11, rtol=1e-11)


@pytest.mark.slow
def test_the_operators_are_what_pytorch_takes_them_for():
    q, k, v = tensors(9)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    start_rows = torch.tensor([2, 4, 4, 4, 9, 7, 9, 9, 9], dtype=torch.int32)
    run_ends = torch.tensor([1, 3, 3, 4, 5, 6, 9, 9, 9], dtype=torch.int32)
    documents = bounds, start_rows, run_ends
    sinks = torch.zeros(4, requires_grad=True)
    forward = torch.ops.penstock.packed_attention.default
    opcheck(forward, (q, k, v, sinks, *documents, 0.3, 3))
    y, lse = forward(q, k, v, sinks, *documents, 0.3, 3)
    given = [part.detach() for part in (y, q, k, v, y, lse)]
    backward = torch.ops.penstock.packed_attention_backward.default
    opcheck(backward, (*given, *documents, 0.3, 3))
