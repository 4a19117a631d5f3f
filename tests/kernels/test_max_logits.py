"""The largest attention logits, reference and Triton, against all scores in fp64."""

import random

import pytest
import torch

from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.attention.mask import causal_window_mask
from penstock_kernels.max_logits import max_logits
from tests.kernels.where import DEVICE, needs_triton

DTYPES = (torch.float32, torch.bfloat16)


def exact(q_TNH, k_TKH, segments, scale, window):
    """Of each document by itself, with all scores at once."""
    found, first = [], 0
    for length in segments.lengths:
        q, k = (x[first : first + length].double() for x in (q_TNH, k_TKH))
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        masks = segments.document_masks(first, length)
        hidden = causal_window_mask(length, window, q.device, *masks)
        scores = torch.einsum("qnh,knh->nqk", q, k) * scale
        found.append(scores.masked_fill(hidden, float("-inf")).amax((1, 2)))
        first += length
    return torch.stack(found).amax(0)


def drawn(seed, dtype):
    dice = random.Random(seed)
    lengths = [dice.choice((1, 2, 31, 63, 64, 65, 97, 300)) for _ in range(dice.randint(1, 4))]
    keys = dice.choice((1, 2, 3))
    heads, width = keys * dice.choice((1, 2, 4)), dice.choice((8, 24, 64, 192))
    tokens, generator = sum(lengths), torch.Generator().manual_seed(seed)
    # As of a fused projection: heads are not next to each other in memory.
    both = torch.randn(tokens, heads + keys, width, generator=generator).to(DEVICE, dtype)
    starts, window = None, dice.choice((None, 1, 7, 90))
    if window is None and dice.random() < 0.5:
        starts = [dice.randint(token + 1, tokens + 1) for token in range(tokens)]
    segments = VarlenMetadata.of(lengths, DEVICE, start_rows=starts)
    return both[:, :heads], both[:, heads:], segments, width**-0.5, window


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_triton)])
def test_they_are_the_maxima_of_what_tokens_attend_to(backend):
    run = max_logits.backend(backend)
    for seed in range(40):
        dtype = DTYPES[seed % 2]
        inputs = drawn(seed, dtype)
        torch.testing.assert_close(run(*inputs).double(), exact(*inputs), rtol=1e-5, atol=1e-6)


def test_runs_that_are_bidirectional_are_left_to_the_reference():
    q, k, *_ = drawn(3, torch.float32)
    q, k = (x.repeat(300 // len(x) + 1, 1, 1)[:300] for x in (q, k))
    segments = VarlenMetadata.of([300], DEVICE, bidirectional=[(20, 30), (200, 290)])
    for window in (None, 7):
        inputs = (q, k, segments, 1.0, window)
        torch.testing.assert_close(max_logits(*inputs).double(), exact(*inputs))


@needs_triton
def test_a_window_and_start_rows_together_are_left_to_the_reference():
    q, k = torch.randn(4, 1, 16, device=DEVICE), torch.randn(4, 1, 16, device=DEVICE)
    segments = VarlenMetadata.of([4], DEVICE, start_rows=[4, 3, 4, 4])
    inputs = (q, k, segments, 1.0, 2)
    torch.testing.assert_close(max_logits(*inputs).double(), exact(*inputs), rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="start rows and a window"):
        max_logits.backend("triton")(*inputs)
