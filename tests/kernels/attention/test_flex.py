"""Attention through flex_attention: what it computes, and which blocks it visits.

It has no gradients on CPUs: those are asked for on CUDA.
"""

import random

import pytest
import torch
from torch.nn.attention import flex_attention

from penstock_kernels.attention import VarlenMetadata, attention
from penstock_kernels.attention.flex import BLOCK, blocks, flex
from tests.dense import visible
from tests.kernels.attention.attention_cases import (
    drawn,
    of_shared_prompts,
    random_runs,
    random_start_rows,
)

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "seeds",
    [range(6), pytest.param(range(6, 100), marks=[pytest.mark.slow, pytest.mark.exhaustive])],
)
def test_a_hundred_random_cases_are_those_of_the_reference(seeds, monkeypatch):
    # Each case would be traced anew, for seconds.
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    for seed in seeds:
        case = drawn(seed)
        q, k, v, _, sinks = case.tensors(torch.float32)
        documents = VarlenMetadata.of(case.lengths, **case.masks)
        settings = documents, case.scale, case.window, sinks, case.soft_cap
        want = attention.backend("eager")(q, k, v, *settings)
        torch.testing.assert_close(flex(q, k, v, *settings), want, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 300])
@pytest.mark.parametrize(
    "lengths", [[1], [128], [129], [500, 12], [5, 700, 1, 90, 300], [30] * 30], ids=str
)
@pytest.mark.parametrize("masked", ["", "parted", "bidirectional"])
def test_blocks_are_visited_if_something_is_seen_in_them(lengths, window, masked):
    draw = random.Random(0)
    masks = {
        "start_rows": random_start_rows(draw, lengths) if masked == "parted" else None,
        "bidirectional": random_runs(draw, lengths) if masked == "bidirectional" else (),
    }
    documents = VarlenMetadata.of(lengths, **masks)
    mask = blocks(documents, documents.effective_window(window))
    sees = visible(lengths, window, **masks)
    total = sum(lengths)
    at = torch.arange(total)
    of_mask = mask.mask_mod(torch.tensor(0), torch.tensor(0), at[:, None], at[None])
    assert torch.equal(of_mask, sees)
    count = -(-total // BLOCK)
    tiles = torch.zeros(count * BLOCK, count * BLOCK, dtype=torch.bool)
    tiles[:total, :total] = sees
    tiles = tiles.unflatten(1, (count, BLOCK)).unflatten(0, (count, BLOCK))
    some, every = tiles.any(3).any(1), tiles.all(3).all(1)
    partial = listed(mask.kv_num_blocks, mask.kv_indices)
    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (partial & full).any()
    # In full blocks no pair is asked about.
    assert not (full & ~every).any()
    assert not (some & ~(partial | full)).any()
    if not masked:
        # Where tokens start to be hidden one by one a block may be visited for nothing.
        assert torch.equal(full, every)
        assert torch.equal(partial | full, some)


def listed(counts, indices):
    """bool [n, n] of lists of blocks."""
    counts, indices = counts[0, 0], indices[0, 0]
    chosen = torch.zeros(indices.shape, dtype=torch.bool)
    for row, (count, those) in enumerate(zip(counts.tolist(), indices, strict=True)):
        chosen[row, those[:count].long()] = True
    return chosen


def test_blocks_are_found_once_for_all_layers_with_a_window():
    documents = VarlenMetadata.of([200, 100])
    assert blocks(documents, 5) is blocks(documents, 5)
    assert blocks(documents, 5) is not blocks(documents, None)


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("seed", range(130, 142))
@pytest.mark.parametrize("masked", ["start_rows", "bidirectional"])
def test_on_cuda_forward_and_backward_are_those_of_the_reference(seed, masked):
    case = drawn(seed)
    lengths, start_rows = of_shared_prompts([(100, 40, 70), (1, 1, 1), (40, 300, 3)])
    runs = random_runs(random.Random(seed), lengths)
    masks = {masked: {"start_rows": start_rows, "bidirectional": runs}[masked]}
    results = []
    for dtype, backend in ((torch.bfloat16, "native"), (torch.float32, "eager")):
        documents = VarlenMetadata.of(lengths, "cuda", **masks)
        generator = torch.Generator().manual_seed(seed)
        query, key = case.heads
        parts = [
            torch.randn(sum(lengths), heads, 32, generator=generator).bfloat16().to("cuda", dtype)
            for heads in (query, key, key, query)
        ]
        q, k, v = (part.requires_grad_() for part in parts[:3])
        y = attention.backend(backend)(
            q, k, v, documents, case.scale, case.window, None, case.soft_cap
        )
        results.append([y, *torch.autograd.grad(y, (q, k, v), parts[3])])
    for mine, exact in zip(*results, strict=True):
        # Where each token sees itself alone, queries and keys have no gradient.
        size = max(exact.double().norm(), 0.1 * exact.numel() ** 0.5)
        assert (mine.double() - exact.double()).norm() < 1e-2 * size
