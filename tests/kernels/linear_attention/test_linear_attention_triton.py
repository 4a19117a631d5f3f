"""Linear attention on Triton, judged by the recurrence in fp64."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.library import opcheck

from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.linear_attention import linear_attention
from penstock_kernels.op import INTERPRETED, UnsupportedError
from tests.kernels.linear_attention.cases import drawn, error
from tests.kernels.where import DEVICE, needs_triton

pytestmark = [needs_triton, pytest.mark.usefixtures("poisoned")]

ROUNDING = {torch.float32: 5e-5, torch.float16: 1e-2, torch.bfloat16: 1e-1}
"""Interpreted, a kernel cuts bits off where a GPU rounds."""

SEEDS = [
    range(4),
    *(pytest.param(range(at, at + 14), marks=pytest.mark.exhaustive) for at in range(4, 102, 14)),
]


def on_triton(*given):
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]] = linear_attention.backend("triton")
    return run(*given)


def calm(case):
    """With rates up to 1: above it, rounding errors are not forgotten."""
    *others, beta, initial = case.tensors
    return replace(case, tensors=(*others, None if beta is None else beta / 2, initial))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", SEEDS)
def test_values_and_gradients_are_those_of_the_recurrence(seeds, monkeypatch):
    # So few that a program counts several times.
    monkeypatch.setattr("penstock_kernels.linear_attention.triton.DOCUMENTS", 2)
    for seed in seeds:
        dtype = [*ROUNDING][seed % 3]
        # The largest cases take seconds in the interpreter.
        lengths = (1, 2, 33, 64) if seed < 4 else (1, 2, 63, 64, 65, 130)
        widths = (3, 17, 32) if seed < 4 else (1, 3, 17, 32, 65)
        if seed >= 4 and dtype != torch.float32:
            # Keys of few channels are nearly the same, and the system ill-conditioned in 16 bits.
            widths = (17, 32, 65)
        case = calm(drawn(seed, documents=3, widths=widths, lengths=lengths)).rounded(dtype)
        want = case.with_gradients(linear_attention.reference)
        for mine, exact in zip(case.with_gradients(on_triton, dtype), want, strict=True):
            assert error(mine, exact) < ROUNDING[dtype], (seed, case.lengths)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [False, True])
def test_chunks_pass_their_states_on(channels):
    case = calm(drawn(1, channels=channels, documents=1, widths=(8, 17), lengths=(140,)))
    case = replace(
        case, lengths=(65, 75), slopes=(case.slopes[0], case.slopes[1].repeat(2, 1, 1, 1))
    )
    q, k, v, log_decay, beta, _ = case.tensors
    beta = torch.rand_like(v[..., 0]) if beta is None else beta
    case = replace(case, tensors=(q, k, v, log_decay / 10, beta, case.slopes[1] / 2))
    want = case.with_gradients(linear_attention.reference)
    for mine, exact in zip(case.with_gradients(on_triton, torch.float32), want, strict=True):
        assert error(mine, exact) < ROUNDING[torch.float32]


def test_a_packed_neighbour_changes_nothing():
    case = drawn(5, channels=False, documents=1, lengths=(66,), widths=(8,))
    q, k, v, log_decay, beta, _ = (None if x is None else x.float() for x in case.tensors)

    def beside(other):
        def more(x):
            return None if x is None else torch.cat((other * x[:5], x, other * x[:9]))

        given = [more(x) for x in (q, k, v, log_decay, beta)]
        segments = VarlenMetadata.of((5, 66, 9), DEVICE)
        y, states = on_triton(*given, segments, 1.0)
        return y[5:71], states[1]

    for mine, theirs in zip(beside(1), beside(0.5), strict=True):
        torch.testing.assert_close(mine, theirs, atol=0, rtol=0)


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
def test_chunks_past_the_last_read_nothing(monkeypatch):
    from triton.runtime.interpreter import InterpreterBuilder

    from penstock_kernels.linear_attention import triton

    # There may be four chunks: two of 128 tokens, and one more for each document.
    segments = VarlenMetadata.of((64, 64), DEVICE)
    q, v, log_decay = torch.randn(128, 1, 4), torch.randn(128, 1, 4), -torch.rand(128, 1)
    given: Any = (q, q, v, log_decay, None, None, segments.cu_seqlens, 1.0)
    results: Any = triton._run(*given)
    _, _, deltas, sums, *products = results
    sums, past = torch.cat((sums, torch.empty(256, 1))).split((128, 256))
    load, addresses = InterpreterBuilder.create_masked_load, set()

    def recorded(builder, ptrs, mask, *options):
        addresses.update(ptrs.data[mask.data].flatten().tolist())
        return load(builder, ptrs, mask, *options)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", recorded)
    triton._gradients(v, None, deltas, sums, *products, *given)
    assert sums.data_ptr() in addresses
    assert addresses.isdisjoint(range(past.data_ptr(), past.data_ptr() + past.nbytes))


def test_unsupported_inputs_are_refused():
    case = drawn(1, documents=1)
    q, k, v, log_decay, _, _ = case.tensors
    segments = VarlenMetadata.of(case.lengths, DEVICE)
    with pytest.raises(UnsupportedError, match="float64"):
        on_triton(q, k, v, log_decay, None, segments, 1.0)
    wide = torch.zeros(len(v), 1, 257, device=DEVICE)
    with pytest.raises(UnsupportedError, match="257 wide"):
        on_triton(wide, wide, v.float(), -v[..., 0].float(), None, segments, 1.0)


def test_pytorch_finds_no_fault_with_the_operator():
    case = drawn(4, documents=2, lengths=(3, 20), widths=(4,), channels=False)
    tensors = [None if x is None else x.float().requires_grad_() for x in case.tensors]
    cu_seqlens = VarlenMetadata.of(case.lengths, DEVICE).cu_seqlens
    opcheck(
        torch.ops.penstock.linear_attention.default,
        (*tensors, cu_seqlens, 1.0),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.slow
def test_it_is_compiled_in_one_graph():
    case = drawn(4, documents=2, lengths=(3, 20), widths=(4,), channels=True)
    run = torch.compile(linear_attention.backend("triton"), fullgraph=True, backend="aot_eager")
    want = case.with_gradients(on_triton, torch.float32)
    for mine, exact in zip(case.with_gradients(run, torch.float32), want, strict=True):
        torch.testing.assert_close(mine, exact)
