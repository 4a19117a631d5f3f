"""Attention to keys in pages, against causal attention over the same tokens side by side."""

import random
from typing import NamedTuple

import pytest
import torch

from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.attention.paged import PagedSequences, paged_attention
from penstock_kernels.attention.reference import eager
from tests.kernels.where import DEVICE, needs_triton

ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}


class Case(NamedTuple):
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    sequences: PagedSequences
    settings: tuple
    expected: torch.Tensor


def drawn(seed: int, dtype: torch.dtype, *, is_decode: bool, capped: bool = False) -> Case:
    """Sequences of which some begin alike, in pages drawn from a pool of garbage."""
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    key_heads, size = dice.choice((1, 2)), dice.choice((4, 16, 64))
    heads = key_heads * dice.choice((1, 3, 4))
    width = dice.choice((16, 24, 64, 576 if seed % 5 == 0 else 32))
    lengths = [dice.choice((1, 2, 15, 16, 17, 70, 530, 700)) for _ in range(dice.randint(1, 5))]
    new = [1 if is_decode else dice.randint(1, min(length, 90)) for length in lengths]
    same = dice.random() < 0.4
    parts_of = [
        [
            torch.randn(length, key_heads, width, generator=generator)
            for _ in range(1 if same else 2)
        ]
        for length in lengths
    ]
    # The second begins with whole pages of the first.
    shared = 0
    if len(lengths) > 1:
        shared = min(lengths[0] - new[0], lengths[1] - new[1]) // size
        for first, second in zip(*parts_of[:2], strict=True):
            second[: shared * size] = first[: shared * size]
    pages = iter(torch.randperm(400, generator=generator).tolist())
    if dice.random() < 0.5:
        pages = iter(range(3, 400))
    tables = [[next(pages) for _ in range(-(-length // size))] for length in lengths]
    if shared:
        tables[1][:shared] = tables[0][:shared]
    stores = [torch.randn(400, size, key_heads, width, generator=generator) for _ in parts_of[0]]
    for table, parts, length in zip(tables, parts_of, lengths, strict=True):
        slots = torch.tensor(table).repeat_interleave(size)[:length] * size
        slots += torch.arange(length) % size
        for store, part in zip(stores, parts, strict=True):
            store.flatten(0, 1)[slots] = part
    stores = [store.to(DEVICE, dtype) for store in stores]
    q_TNH = torch.randn(sum(lengths), heads, width, generator=generator).to(DEVICE, dtype)
    k_TKH, v_TKH = (torch.cat([parts[i] for parts in parts_of]).to(dtype) for i in (0, -1))
    window = dice.choice((None, 1, 5, 40, 600))
    sinks_N = torch.randn(heads, generator=generator).to(DEVICE) if dice.random() < 0.4 else None
    settings = (width**-0.5, window, sinks_N, 2.0 if capped else None)
    q_wide, k_wide, v_wide = (x.to(DEVICE).double() for x in (q_TNH, k_TKH, v_TKH))
    documents, sinks_wide = VarlenMetadata.of(lengths, DEVICE), None
    if sinks_N is not None:
        sinks_wide = sinks_N.double()
    scale, soft_cap = settings[0], settings[-1]
    y_TNH = eager(q_wide, k_wide, v_wide, documents, scale, window, sinks_wide, soft_cap)
    newest = [part[-count:] for part, count in zip(y_TNH.split(lengths), new, strict=True)]
    queries = [part[-count:] for part, count in zip(q_TNH.split(lengths), new, strict=True)]
    sequences = PagedSequences(size, tables, new, lengths, torch.device(DEVICE))
    return Case(torch.cat(queries), stores[0], stores[-1], sequences, settings, torch.cat(newest))


BACKENDS = ["reference", "runs", pytest.param("triton", marks=needs_triton)]


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "chunks"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_in_any_order_give_what_tokens_side_by_side_give(backend, is_decode):
    run = paged_attention.backend(backend)
    dtypes = [torch.float32, torch.bfloat16] if backend == "triton" else [*ROUNDING]
    for seed in range(10 if backend == "triton" else 24):
        dtype = dtypes[seed % len(dtypes)]
        case = drawn(seed, dtype, is_decode=is_decode, capped=backend != "runs" and seed % 4 == 0)
        # A layer with another window before it leaves nothing behind.
        scale, _, *others = case.settings
        run(*case[:4], scale, 7, *others)
        y_TNH = run(*case[:4], *case.settings)
        assert y_TNH.dtype == dtype
        torch.testing.assert_close(
            y_TNH.double(), case.expected, atol=ROUNDING[dtype], rtol=ROUNDING[dtype]
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_is_computed_alike_whatever_else_is_in_the_step(backend):
    run = paged_attention.backend(backend)
    case = drawn(3, torch.float32, is_decode=True)
    together = run(*case[:4], *case.settings)
    for number, query in enumerate(case.queries):
        table, count = case.sequences.tables[number], case.sequences.num_keys[number]
        alone = PagedSequences(
            case.sequences.page_size, [table], [1], [count], torch.device(DEVICE)
        )
        y_1NH = run(query.unsqueeze(0), case.keys, case.values, alone, *case.settings)
        torch.testing.assert_close(y_1NH[0], together[number], atol=2e-6, rtol=2e-6)
        if backend == "triton":
            assert torch.equal(y_1NH[0], together[number])
