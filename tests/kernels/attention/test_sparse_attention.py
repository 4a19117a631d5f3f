"""Sparse attention: in chunks as by its definition, and dense where all tokens are selected."""

import pytest
import torch

from penstock_kernels.attention import VarlenMetadata, attention
from penstock_kernels.sparse_attention import (
    PartialSegments,
    chunked,
    indexer_loss,
    select_keys,
    sparse_attention,
)

LENGTHS = [1, 40, 7, 63, 64, 65, 130]
SEGMENTS = VarlenMetadata.of(LENGTHS)
SCALE = 0.2


Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(dtype=torch.float64, heads=3, width=20) -> tuple[Triple, Triple]:
    generator = torch.Generator().manual_seed(0)

    def made(*shape):
        return torch.randn(SEGMENTS.num_tokens, *shape, generator=generator, dtype=dtype)

    q, k, v = (made(heads, width).requires_grad_() for _ in range(3))
    # Scores of 0 are equal, and any of them may be selected: with many heads there are few.
    return (q, k, v), (made(16, 12), made(12), made(16).abs())


def gradients(y, qkv):
    return torch.autograd.grad(y, qkv, torch.ones_like(y).cumsum(0) / len(y))


@pytest.mark.parametrize("top_k", [1, 16, 64, 200])
@pytest.mark.parametrize("pairs", [100, 1000, chunked.PAIRS])
def test_chunks_of_any_size_are_computed_as_by_the_definition(top_k, pairs, monkeypatch):
    monkeypatch.setattr(chunked, "PAIRS", pairs)
    qkv, index = inputs()
    wanted_TS = select_keys.backend("reference")(*index, SEGMENTS, top_k)
    selected_TS = select_keys(*index, SEGMENTS, top_k)
    assert selected_TS.shape == (len(qkv[0]), min(top_k, 130))
    assert torch.equal(selected_TS.sort(1)[0], wanted_TS.sort(1)[0])
    y = sparse_attention(*qkv, selected_TS, SEGMENTS, SCALE)
    wanted = sparse_attention.backend("reference")(*qkv, wanted_TS, SEGMENTS, SCALE)
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-13)
    for one, other in zip(gradients(y, qkv), gradients(wanted, qkv), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_with_as_many_keys_as_tokens_it_is_attention():
    qkv, index = inputs()
    y = sparse_attention(*qkv, select_keys(*index, SEGMENTS, 130), SEGMENTS, SCALE)
    torch.testing.assert_close(y, attention(*qkv, SEGMENTS, SCALE), rtol=1e-12, atol=1e-13)


def test_the_best_visible_tokens_of_the_own_document_are_selected():
    _, (q, k, weight) = inputs()
    selected_TS, first = select_keys(q, k, weight, SEGMENTS, 5), 0
    for length in LENGTHS:
        for token in range(first, first + length):
            scores = (k[first : token + 1] @ q[token].T).relu() @ weight[token]
            best = set((first + scores.topk(min(5, len(scores))).indices).tolist())
            assert set(selected_TS[token].tolist()) - {-1} == best
        first += length


def test_in_16_bits_it_is_the_rounded_result_of_rounded_inputs():
    qkv, index = inputs()
    selected_TS = select_keys(*index, SEGMENTS, 16)
    q, k, v = short = tuple(part.detach().bfloat16().requires_grad_() for part in qkv)
    y = sparse_attention(q, k, v, selected_TS, SEGMENTS, SCALE)
    q, k, v = long = tuple(part.detach().double().requires_grad_() for part in short)
    wanted = sparse_attention.backend("reference")(q, k, v, selected_TS, SEGMENTS, SCALE)
    assert y.dtype == torch.bfloat16
    assert (y - wanted).norm() < 4e-3 * wanted.norm()
    for one, other in zip(gradients(y, short), gradients(wanted, long), strict=True):
        assert (one - other).norm() < 1e-2 * other.norm()


@pytest.mark.slow
def test_a_compiled_caller_is_one_graph_and_computes_the_same():
    qkv, index = inputs(torch.float32)

    def layer(q, k, v):
        selected_TS = select_keys(*index, SEGMENTS, 16)
        return sparse_attention(q, k, v, selected_TS, SEGMENTS, SCALE) * 2

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    y, wanted = compiled(*qkv), layer(*qkv)
    torch.testing.assert_close(y, wanted)
    for one, other in zip(gradients(y, qkv), gradients(wanted, qkv), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("top_k", [None, 16])
@pytest.mark.parametrize("pairs", [1000, chunked.PAIRS])
def test_the_loss_of_an_indexer_is_its_divergence_from_the_attention_of_all_heads(
    top_k, pairs, monkeypatch
):
    """The published formula, document by document, and PyTorch's gradients of it."""
    monkeypatch.setattr(chunked, "PAIRS", pairs)
    (q, k, _), index = inputs()
    index = tuple(part.requires_grad_() for part in index)
    assert len(index) == 3
    (qi, ki, weight), counted = index, SEGMENTS.num_tokens - 20
    selected_TS = None if top_k is None else select_keys(*index, SEGMENTS, top_k)
    wanted, first = torch.zeros((), dtype=q.dtype), 0
    for length in LENGTHS:
        for token in range(first, min(first + length, counted)):
            seen = torch.arange(first, token + 1)
            if selected_TS is not None:
                seen = selected_TS[token][selected_TS[token] >= 0].long()
            p = torch.stack([(q[token, n] @ k[seen, n].T * SCALE).softmax(0) for n in range(3)])
            scores = (ki[seen] @ qi[token].T).relu() @ weight[token]
            p = (p.sum(0) / p.sum()).detach()
            wanted = wanted + (p * (p.log() - scores.log_softmax(0))).sum()
        first += length
    loss = indexer_loss(index, q, k, selected_TS, SEGMENTS, SCALE, counted)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    of_all_heads, of_each = (
        indexer_loss(index, q, keys, selected_TS, SEGMENTS, SCALE, counted)
        for keys in (k[:, :1], k[:, :1].expand(-1, 3, -1))
    )
    assert torch.equal(of_all_heads, of_each)
    found = torch.autograd.grad(loss * 3, index)
    for one, other in zip(found, torch.autograd.grad(wanted * 3, index), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_some_of_the_queries_give_their_rows_and_gradients_add_up(backend, monkeypatch):
    monkeypatch.setattr(chunked, "PAIRS", 1000)
    (q, k, v), index = inputs()
    qi, ki, weight = index = (index[0].requires_grad_(), index[1].requires_grad_(), index[2])
    weight.requires_grad_()
    tokens = SEGMENTS.num_tokens
    select, attend = select_keys.backend(backend), sparse_attention.backend(backend)
    selected_TS = select(*index, SEGMENTS, 16)
    y = attend(q, k, v, selected_TS, SEGMENTS, SCALE)
    loss = indexer_loss(index, q, k, selected_TS, SEGMENTS, SCALE, tokens - 5)
    wanted = torch.autograd.grad(y.square().sum() + loss, (q, k, v, *index))
    quarter = tokens // 4
    outer = (range(quarter), range(3 * quarter, tokens))
    inner = (range(quarter, 2 * quarter), range(2 * quarter, 3 * quarter))
    total = torch.zeros((), dtype=y.dtype)
    for queries in (outer, inner):
        own = torch.cat([torch.arange(one.start, one.stop) for one in queries])
        some = PartialSegments(**vars(SEGMENTS), queries=queries)
        chosen_TS = select(qi[own], ki, weight[own], some, 16)
        assert torch.equal(chosen_TS.sort(1)[0], selected_TS[own].sort(1)[0])
        mine = attend(q[own], k, v, chosen_TS, some, SCALE)
        torch.testing.assert_close(mine, y[own], rtol=1e-12, atol=1e-13)
        its = qi[own], ki, weight[own]
        part = indexer_loss(its, q[own], k, chosen_TS, some, SCALE, tokens - 5)
        total = total + mine.square().sum() + part
    for one, other in zip(torch.autograd.grad(total, (q, k, v, *index)), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
