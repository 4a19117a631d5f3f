"""The Triton kernels of sparse attention, beside its definition."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.sparse_attention import (
    PartialSegments,
    latent,
    latent_sparse_attention,
    select_keys,
    triton_select,
)
from penstock_kernels.sparse_attention.reference import NO_KEY
from tests.kernels.where import DEVICE, needs_triton

pytestmark = needs_triton

LENGTHS = [1, 3, 40]
SEGMENTS = VarlenMetadata.of(LENGTHS, DEVICE)
SCALE = 0.2
RANK, ROPE, SELECTED = 24, 6, 35
"""No powers of two, and more than one tile of keys."""


def inputs(dtype, heads):
    """Queries, latent keys, and selections of visible tokens, in any order and with gaps."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape):
        return torch.randn(SEGMENTS.num_tokens, *shape, generator=generator).to(DEVICE, dtype)

    # As after a product over heads: the tokens of a head lie together.
    q = made(heads, RANK).transpose(0, 1).contiguous().transpose(0, 1)
    qk = tuple(x.requires_grad_() for x in (q, made(heads, ROPE), made(RANK), made(ROPE)))
    rows, first = [], 0
    for length in LENGTHS:
        for token in range(first, first + length):
            seen = first + torch.randperm(token + 1 - first, generator=generator)
            row = torch.full((SELECTED,), NO_KEY)
            places = torch.randperm(SELECTED, generator=generator)[: len(seen)]
            row[places] = seen[: len(places)]
            rows.append(row)
        first += length
    return qk, torch.stack(rows).to(DEVICE, torch.int32)


def results(run, qk, selected_TS):
    y = run(*qk, selected_TS, SEGMENTS, SCALE)
    return y, *torch.autograd.grad(y, qk, slope(y))


def slope(y):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(y.shape, generator=generator).to(DEVICE, y.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [3, 40])
def test_outputs_and_gradients_are_those_of_the_definition(heads):
    qk, selected_TS = inputs(torch.float32, heads)
    found = results(latent_sparse_attention.backend("triton"), qk, selected_TS)
    wanted = results(latent_sparse_attention.reference, qk, selected_TS)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_in_16_bits_it_is_the_rounded_result_of_rounded_inputs():
    qk, selected_TS = inputs(torch.bfloat16, 3)
    found = results(latent_sparse_attention.backend("triton"), qk, selected_TS)
    wide = tuple(x.detach().double().requires_grad_() for x in qk)
    wanted = results(latent_sparse_attention.reference, wide, selected_TS)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - other).norm() < 1e-2 * other.norm()


@pytest.mark.exhaustive
def test_a_compiled_caller_is_one_graph_and_computes_the_same():
    qk, selected_TS = inputs(torch.float32, 3)
    run = latent_sparse_attention.backend("triton")
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    found, wanted = results(compiled, qk, selected_TS), results(run, qk, selected_TS)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_deterministic_gradients_are_added_in_order_and_nothing_waits_for_the_gpu(monkeypatch):
    # Of ten queries at a time, in two blocks of heads.
    monkeypatch.setattr(latent, "PARTS_BYTES", 10 * SELECTED * 2 * (RANK + ROPE) * 4)
    monkeypatch.setitem(latent.ADDED, "KEYS", 3)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    qk, selected_TS = inputs(torch.float32, 40)
    _, *wanted = results(latent_sparse_attention.reference, qk, selected_TS)
    q, q_rope, keys, k_rope = (x.detach() for x in qk)
    how = selected_TS, SEGMENTS, SCALE
    assert latent.unsupported_reason(q, q_rope, keys, k_rope, *how) is None
    y, log_sum = latent._forward(q, q_rope, keys, k_rope, selected_TS, SCALE)
    saved = y, slope(y), log_sum
    with NoHostReads():
        found = latent._backward(q, q_rope, keys, k_rope, selected_TS, *saved, SCALE)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


class NoHostReads(TorchDispatchMode):
    """Refuses what reads a tensor's number on the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_vectors_that_no_gpu_has_room_for_are_left_to_others():
    qk, selected_TS = inputs(torch.float32, 3)
    large = tuple(x.detach().repeat_interleave(64, -1) for x in qk)
    with pytest.raises(RuntimeError, match=r"1536 \+ 384 features in torch.float32 do not fit"):
        latent_sparse_attention.backend("triton")(*large, selected_TS, SEGMENTS, SCALE)


@pytest.mark.parametrize("top_k", [2, 20, 40])
@pytest.mark.parametrize("numbers", [1, triton_select.NUMBERS])
def test_the_keys_that_are_selected_are_those_of_the_definition(top_k, numbers, monkeypatch):
    monkeypatch.setattr(triton_select, "NUMBERS", numbers)
    monkeypatch.setitem(triton_select.TILE, "QUERIES", 16)
    generator = torch.Generator().manual_seed(2)
    segments = VarlenMetadata.of([1, 33, 2, 40], DEVICE)
    q, k, weight = (
        torch.randn(segments.num_tokens, *shape, generator=generator).to(DEVICE)
        for shape in ((9, 20), (20,), (9,))
    )
    found = select_keys.backend("triton")(q, k, weight, segments, top_k)
    wanted = select_keys.reference(q, k, weight, segments, top_k)
    assert torch.equal(found.sort(1)[0], wanted.sort(1)[0])
    some = PartialSegments(**vars(segments), queries=(range(5, 20), range(50, 70)))
    own = torch.cat([torch.arange(5, 20), torch.arange(50, 70)])
    found = select_keys.backend("triton")(q[own], k, weight[own], some, top_k)
    assert torch.equal(found.sort(1)[0], wanted[own].sort(1)[0])
