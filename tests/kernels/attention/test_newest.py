"""Attention of the newest token to kept keys and values, judged by the definition in fp64."""

import pytest
import torch

from penstock_kernels.attention.decode import decode_attention
from tests.dense import dense_attention, relative_error

# One rounding of scores' inputs and of the output; sums in fp32.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}
LENGTHS = [1, 7, 20, 33]
ROOM, HEADS, KEYS, WIDTH = 40, 6, 2, 16


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 5], ids=["all", "a window"])
@pytest.mark.parametrize("soft_cap", [None, 1.5], ids=["not capped", "capped"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["no sinks", "sinks"])
def test_the_last_query_of_each_document_gets_what_attention_gives_it(
    dtype, window, with_sinks, soft_cap
):
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    q, k, v = (torch.randn(tokens, n, WIDTH, dtype=dtype) for n in (HEADS, KEYS, KEYS))
    sinks = torch.randn(HEADS, dtype=dtype) if with_sinks else None
    ends = torch.tensor(LENGTHS).cumsum(0)
    scale = WIDTH**-0.5
    wanted = dense_attention(q, k, v, LENGTHS, scale, window, sinks, soft_cap=soft_cap)[ends - 1]
    k_kept, v_kept = torch.randn(2, len(LENGTHS), KEYS, ROOM, WIDTH, dtype=dtype)
    for row, (end, length) in enumerate(zip(ends.tolist(), LENGTHS, strict=True)):
        for x_BKCH, x in ((k_kept, k), (v_kept, v)):
            x_BKCH[row, :, :length] = x[end - length : end].transpose(0, 1)
    places, lengths = torch.arange(ROOM), torch.tensor(LENGTHS)[:, None]
    sees = places < lengths
    if window:
        sees &= places >= lengths - window
    got = decode_attention(q[ends - 1], k_kept, v_kept, sees, scale, sinks, soft_cap)
    assert got.dtype == dtype
    assert relative_error(got, wanted) < TOLERANCE[dtype]
