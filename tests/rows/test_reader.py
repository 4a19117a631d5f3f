import logging

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ArtifactError
from penstock.rows.reader import PackedRows
from penstock.rows.schema import PACKED
from tests.manifests import write_manifest


def write(folder, *shards, rows_per_batch=2):
    """Shards of (input_ids, labels, lengths) rows."""
    for index, rows in enumerate(shards):
        path = folder / f"rows-{index:05d}-of-{len(shards):05d}.arrow"
        with pa.ipc.new_file(str(path), PACKED) as writer:
            for low in range(0, len(rows), rows_per_batch):
                columns = [list(c) for c in zip(*rows[low : low + rows_per_batch], strict=True)]
                writer.write_batch(pa.record_batch(columns, schema=PACKED))


def test_any_row_of_any_shard_and_batch_is_read_as_it_was_written(tmp_path):
    rows = [[[n] * (n + 1), [n] * (n + 1), [n + 1]] for n in range(7)]
    write(tmp_path, rows[:3], [], rows[3:])
    packed = PackedRows(tmp_path)
    assert len(packed) == 7
    for index in (6, 0, 3, 2, 5, 1, 4):
        row = packed.row(index)
        assert [row.input_ids.tolist(), row.labels.tolist(), row.lengths.tolist()] == rows[index]
        assert row.number == index
        assert not row.input_ids.flags.writeable  # a view of the mapped file
    assert packed.lengths().tolist() == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(IndexError):
        packed.row(7)


@given(
    st.lists(st.lists(st.integers(1, 30), max_size=4), min_size=1, max_size=9), st.integers(1, 4)
)
def test_tokens_and_squares_are_those_of_each_row(tmp_path_factory, documents, rows_per_batch):
    folder = tmp_path_factory.mktemp("rows")
    rows = [[[1] * sum(lengths), [1] * sum(lengths), lengths] for lengths in documents]
    write(folder, rows[:2], rows[2:], rows_per_batch=rows_per_batch)
    packed = PackedRows(folder)
    assert packed.lengths().tolist() == [sum(lengths) for lengths in documents]
    assert packed.squares().tolist() == [sum(n * n for n in lengths) for lengths in documents]


def test_squares_of_very_long_documents_are_exact(tmp_path):
    length = 3_000_000
    ids = np.zeros(length, np.int32)
    write(tmp_path, [[ids, ids, [length]]])
    assert PackedRows(tmp_path).squares().tolist() == [length**2]


def test_a_file_that_the_manifest_does_not_list_is_reported_and_not_read(tmp_path, caplog):
    folder = tmp_path / "data" / "train"
    folder.mkdir(parents=True)
    write(folder, [[[1], [1], [1]]])
    listed = {"path": "data/train/rows-00000-of-00001.arrow", "bytes": 0, "sha256": "0" * 64}
    write_manifest(tmp_path, stage="pack", files=[listed])
    before = len(PackedRows(folder))
    write(folder, [[[1], [1], [1]]], [[[2], [2], [1]]])
    with caplog.at_level(logging.WARNING):
        assert len(PackedRows(folder)) == before == 1
    assert "rows-00001-of-00002.arrow" in caplog.text


def test_a_missing_or_broken_shard_is_an_error_of_the_artifact(tmp_path):
    with pytest.raises(ArtifactError, match="has no packed rows"):
        PackedRows(tmp_path)
    (tmp_path / "rows-00000-of-00001.arrow").write_bytes(b"ARROW1\0\0cut")
    with pytest.raises(ArtifactError, match="cannot be read as Arrow"):
        PackedRows(tmp_path)
