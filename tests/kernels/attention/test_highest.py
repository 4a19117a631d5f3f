"""Of equal index scores, every implementation takes those of the earliest tokens."""

import pytest
import torch

from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.sparse_attention import chunked, reference, triton_select
from penstock_kernels.sparse_attention.reference import NO_KEY, highest
from tests.kernels.where import DEVICE, needs_triton

SEGMENTS = VarlenMetadata.of([1, 3, 70, 41], DEVICE)
HEADS, WIDTH, TOP_K = 2, 16, 9


def tied_inputs():
    """Of a few small whole numbers, so that most scores of a query are equal, and exact."""
    generator = torch.Generator().manual_seed(0)
    shape = SEGMENTS.num_tokens, HEADS, WIDTH
    q_TJI = torch.randint(0, 2, shape, generator=generator).float()
    k_TI = torch.randint(0, 2, (shape[0], WIDTH), generator=generator).float()
    k_TI[:, 3:] = 0
    return q_TJI.to(DEVICE), k_TI.to(DEVICE), torch.ones(shape[:2], device=DEVICE)


@pytest.mark.parametrize(
    "select",
    [
        pytest.param(reference.top_k_keys, id="reference"),
        pytest.param(chunked.select_keys, id="chunked"),
        pytest.param(triton_select.select_keys, id="triton", marks=needs_triton),
    ],
)
def test_of_equal_scores_the_earliest_tokens_are_selected(select):
    q_TJI, k_TI, weight_TJ = tied_inputs()
    selected_TS = select(q_TJI, k_TI, weight_TJ, SEGMENTS, TOP_K).cpu()
    scores_TT = torch.einsum("qji,ki->qjk", q_TJI, k_TI).relu().sum(1).cpu()
    ties, first = 0, 0
    for length in (1, 3, 70, 41):
        for query in range(first, first + length):
            seen = list(range(first, query + 1))
            by_score = sorted(seen, key=lambda key, query=query: (-scores_TT[query, key], key))
            ties += bool(by_score[TOP_K:]) and bool(
                scores_TT[query, by_score[TOP_K - 1]] == scores_TT[query, by_score[TOP_K]]
            )
            selected = sorted(key for key in selected_TS[query].tolist() if key != NO_KEY)
            assert selected == sorted(by_score[:TOP_K])
        first += length
    assert ties > 50


def test_rows_of_one_value_of_infinities_and_of_nan_have_columns_of_their_own():
    hidden = float("-inf")
    scores = torch.tensor([[1.0] * 5, [hidden, 2.0, hidden, hidden, 2.0], [float("nan")] * 5])
    chosen = highest(scores, 3)
    assert chosen[0].tolist() == [0, 1, 2]
    assert chosen[1].tolist() == [0, 1, 4]
    assert int(chosen.max()) < 5
