import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.rows.collate import PADDING, PadTo, collate
from penstock.rows.reader import Row
from penstock.rows.schema import histogram
from penstock.rows.shared_prefix import PrefixSharing, Span

DOCUMENTS = [([1, 2, 3], [2, 3, -100]), ([4, 5], [5, -100])]


def row_of(*documents, number=0):
    ids, labels = (np.concatenate(part).astype(np.int32) for part in zip(*documents, strict=True))
    return Row(ids, labels, np.array([len(ids) for ids, _ in documents], np.int32), number)


def test_padding_is_a_document_of_its_own_and_labels_stay_as_they_are():
    # What the reference training system gives for the same two samples.
    [batch] = collate([[row_of(*DOCUMENTS)]], pad_to_multiple_of=8).micro_batches()
    assert batch.input_ids_T.tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert batch.labels_T.tolist() == [2, 3, -100, 5, -100, -100, -100, -100]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert batch.lengths == (3, 2, 3)
    assert batch.num_trained == 3
    assert batch.input_ids_T.dtype == batch.labels_T.dtype == torch.int64


def test_much_padding_is_cut_into_short_documents():
    [batch] = collate([[row_of(*DOCUMENTS)]], pad_to_multiple_of=8, pad_to=4000).micro_batches()
    padding = batch.lengths[len(DOCUMENTS) :]
    assert sum(batch.lengths) == len(batch.input_ids_T) == 4000
    assert max(padding) == PADDING


def test_rows_are_laid_end_to_end_without_padding_between_them():
    rows = [row_of(DOCUMENTS[0]), row_of(DOCUMENTS[1])]
    [batch] = collate([rows], pad_to_multiple_of=5, pad_token_id=9).micro_batches()
    assert batch.input_ids_T.tolist() == [1, 2, 3, 4, 5]
    assert batch.lengths == (3, 2)


def test_no_rows_give_a_batch_of_padding_that_trains_nothing():
    [batch] = collate([[]], pad_to_multiple_of=4, pad_token_id=9).micro_batches()
    assert batch.input_ids_T.tolist() == [9, 9, 9, 9]
    assert (batch.lengths, batch.num_trained) == ((4,), 0)


def branching_row(prompts, branches, number=0):
    """Tokens and labels count from 0; the documents are of two branches each."""
    branching = PrefixSharing(prompts, branches, (b"x",) * len(prompts))
    lengths = np.array(branching.documents(), np.int32)
    tokens = np.arange(lengths.sum(), dtype=np.int32)
    return Row(tokens, tokens, lengths, number, branching)


def test_branches_go_on_from_their_prompt_and_are_numbered_over_the_rows():
    rows = [branching_row((2,), (2, 1)), branching_row((0, 1), (1, 2, 1, 3), 1)]
    laid = collate([rows, [], [row_of(*DOCUMENTS)]], pad_to_multiple_of=8)
    batch, empty, plain = laid.micro_batches()
    assert batch.lengths == (5, 3, 5, 3)
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 2, 0, 0, 1, 0, 1, 1, 2, 3, 0, 1, 2]
    assert batch.branch_T().tolist() == [-1, -1, 0, 0, 1, 2, 3, 3, -1, 4, 5, 5, 5, -1, -1, -1]
    assert batch.branching
    assert len(batch.branching.samples) == 3
    assert batch.spans() == [
        Span(0, 2, 5),
        Span(2, 4, 4),
        Span(4, 5, 5),
        Span(5, 6, 6),
        Span(6, 8, 8),
        Span(8, 9, 13),
        Span(9, 10, 10),
        Span(10, 13, 13),
        Span(13, 16, 16),
    ]
    for other in (empty, plain):
        assert other.branching is other.spans() is None
        assert other.branch_T().tolist() == [-1] * 8


def test_prompts_that_are_not_shared_make_plain_documents_of_numbered_branches():
    branching = PrefixSharing((0, 0), (3, 2), (b"x",))
    row = row_of(*DOCUMENTS)
    row = Row(row.input_ids, row.labels, row.lengths, 0, branching)
    [batch] = collate([[row]], pad_to_multiple_of=8).micro_batches()
    assert batch.spans() is None
    assert batch.position_ids_T.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert batch.branch_T().tolist() == [0, 0, 0, 1, 1, -1, -1, -1]


def test_a_row_whose_lengths_disagree_with_its_tokens_is_refused():
    ids = np.arange(4, dtype=np.int32)
    bad = Row(ids, ids, np.array([3], np.int32), 0)
    with pytest.raises(ValueError, match="hold 4 tokens"):
        collate([[bad]], pad_to_multiple_of=1)


LENGTHS = st.lists(st.integers(1, 9), max_size=4)


@given(
    st.lists(st.lists(LENGTHS.filter(len), max_size=3), min_size=1, max_size=4), st.integers(1, 16)
)
def test_micro_batches_hold_the_documents_of_their_rows_and_share_one_memory(groups, multiple):
    rng = np.random.default_rng(0)
    documents = [
        [[(rng.integers(9, size=n), rng.integers(-100, 9, size=n)) for n in row] for row in group]
        for group in groups
    ]
    laid = collate(
        [
            [row_of(*row, number=100 * at + row_at) for row_at, row in enumerate(group)]
            for at, group in enumerate(documents)
        ],
        pad_to_multiple_of=multiple,
    )
    found = laid.micro_batches()
    assert len(found) == len(groups)
    for at, (group, batch) in enumerate(zip(documents, found, strict=True)):
        sizes = [sum(len(ids) for ids, _ in row) for row in group]
        places = [
            (100 * at + row_at) * 2**32 + place
            for row_at, size in enumerate(sizes)
            for place in range(size)
        ]
        padding = len(batch.input_ids_T) - len(places)
        assert batch.places().tolist() == places + [-1] * padding
        flat = [document for row in group for document in row]
        used = sum(len(ids) for ids, _ in flat)
        total = max(-(-used // multiple), 1) * multiple
        ids = [int(n) for document, _ in flat for n in document]
        labels = [int(n) for _, document in flat for n in document]
        assert batch.input_ids_T.tolist() == ids + [0] * (total - used)
        assert batch.labels_T.tolist() == labels + [-100] * (total - used)
        assert batch.position_ids_T.tolist() == [n for size in batch.lengths for n in range(size)]
        assert [*batch.lengths[: len(flat)]] == [len(i) for i, _ in flat]
        assert sum(batch.lengths) == total
        assert (batch.num_tokens, batch.num_trained) == (used, sum(n != -100 for n in labels))
        storage = batch.input_ids_T.untyped_storage().data_ptr()
        assert storage == laid.values.untyped_storage().data_ptr()


@given(
    st.lists(st.lists(LENGTHS.filter(len), max_size=2), min_size=1, max_size=3),
    st.integers(1, 16),
    st.integers(0, 9),
)
def test_batches_of_one_length_differ_from_their_own_in_the_padding_document_alone(
    groups, multiple, more
):
    rows = [[row_of(*[([1] * n, [2] * n) for n in row]) for row in group] for group in groups]
    used = [sum(map(sum, group)) for group in groups]
    longest = max(used)
    lengths: list[tuple[PadTo, int]] = [("longest", longest), (longest + more, longest + more)]
    for pad_to, wanted in lengths:
        laid = collate(rows, pad_to_multiple_of=multiple, pad_to=pad_to).micro_batches()
        total = max(-(-wanted // multiple), 1) * multiple
        for batch, tokens, group in zip(laid, used, groups, strict=True):
            documents = [n for row in group for n in row]
            padding = batch.lengths[len(documents) :]
            assert [*batch.lengths[: len(documents)]] == documents
            assert sum(padding) == total - tokens
            assert batch.input_ids_T.tolist() == [1] * tokens + [0] * (total - tokens)
            assert batch.labels_T.tolist() == [2] * tokens + [-100] * (total - tokens)
            assert (batch.num_tokens, batch.num_trained) == (tokens, tokens)


def test_rows_longer_than_the_length_of_all_are_refused():
    with pytest.raises(ValueError, match="5 tokens do not fit a length of 4"):
        collate([[row_of(*DOCUMENTS)]], pad_to_multiple_of=8, pad_to=4)


def test_a_histogram_counts_powers_of_two_upwards():
    assert histogram([1, 2, 3, 4, 5, 8, 9]) == {"1": 1, "2": 1, "4": 2, "8": 2, "16": 1}
