import numpy as np
import pyarrow as pa
import pytest
import torch

from penstock.core.errors import ArtifactError
from penstock.rows.collate import collate
from penstock.rows.reader import PackedRows, Row
from penstock.rows.schema import PACKED, histogram

DOCUMENTS = [([1, 2, 3], [2, 3, -100]), ([4, 5], [5, -100])]


def row_of(*documents):
    ids, labels = (np.concatenate(part).astype(np.int32) for part in zip(*documents, strict=True))
    return Row(ids, labels, np.array([len(ids) for ids, _ in documents], np.int32))


def test_padding_is_a_document_of_its_own_and_labels_stay_as_they_are():
    # What the reference training system gives for the same two samples.
    batch = collate([row_of(*DOCUMENTS)], pad_to_multiple_of=8)
    assert batch.input_ids_T.tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert batch.labels_T.tolist() == [2, 3, -100, 5, -100, -100, -100, -100]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert batch.lengths == (3, 2, 3)
    assert batch.num_trained == 3
    assert batch.input_ids_T.dtype == batch.labels_T.dtype == torch.int64


def test_rows_are_laid_end_to_end_without_padding_between_them():
    rows = [row_of(DOCUMENTS[0]), row_of(DOCUMENTS[1])]
    batch = collate(rows, pad_to_multiple_of=5, pad_token_id=9)
    assert batch.input_ids_T.tolist() == [1, 2, 3, 4, 5]
    assert batch.lengths == (3, 2)


def test_no_rows_give_a_batch_of_padding_that_trains_nothing():
    batch = collate([], pad_to_multiple_of=4, pad_token_id=9)
    assert batch.input_ids_T.tolist() == [9, 9, 9, 9]
    assert (batch.lengths, batch.num_trained) == ((4,), 0)


def test_a_row_whose_lengths_disagree_with_its_tokens_is_refused():
    bad = Row(np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32), np.array([3], np.int32))
    with pytest.raises(ValueError, match="hold 4 tokens"):
        collate([bad], pad_to_multiple_of=1)


def test_any_row_of_any_shard_and_batch_is_read_as_it_was_written(tmp_path):
    rows = [[[n] * (n + 1), [n] * (n + 1), [n + 1]] for n in range(7)]
    for shard, part in enumerate((rows[:3], [], rows[3:])):
        path = tmp_path / f"rows-{shard:05d}-of-00003.arrow"
        with pa.ipc.new_file(path, PACKED) as writer:
            for low in range(0, len(part), 2):
                columns = [list(column) for column in zip(*part[low : low + 2], strict=True)]
                writer.write_batch(pa.record_batch(columns, schema=PACKED))
    packed = PackedRows(tmp_path)
    assert len(packed) == 7
    for index in (6, 0, 3, 2, 5, 1, 4):
        row = packed.row(index)
        assert [row.input_ids.tolist(), row.labels.tolist(), row.lengths.tolist()] == rows[index]
        assert not row.input_ids.flags.writeable  # a view of the mapped file
    assert packed.lengths().tolist() == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(IndexError):
        packed.row(7)


def test_a_missing_or_broken_shard_is_an_error_of_the_artifact(tmp_path):
    with pytest.raises(ArtifactError, match="holds no packed rows"):
        PackedRows(tmp_path)
    (tmp_path / "rows-00000-of-00001.arrow").write_bytes(b"ARROW1\0\0cut")
    with pytest.raises(ArtifactError, match="cannot be read as Arrow"):
        PackedRows(tmp_path)


def test_a_histogram_counts_powers_of_two_upwards():
    assert histogram([1, 2, 3, 4, 5, 8, 9]) == {"1": 1, "2": 1, "4": 2, "8": 2, "16": 1}
