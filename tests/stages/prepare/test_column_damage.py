"""Arrow and Parquet files are validated before anything reads them: no crash, and errors with the
name of the file."""

import struct

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.core.errors import StageError
from penstock.prepare.readers.columnar import arrow_file, arrow_stream, parquet
from penstock.prepare.readers.decompress import SourceFile

OFFSETS = struct.pack("<3i", 0, 3, 6)
TEXTS = pa.array(["abc", "def"])
LISTS = pa.array([["a"] * 3, ["b"] * 3])
INDICES = pa.DictionaryArray.from_arrays(pa.array([1, 0, 1, 1], pa.int32()), ["a", "b"])

DAMAGED = {
    "offsets beyond the data": (TEXTS, OFFSETS, struct.pack("<3i", 0, 3, 1 << 30)),
    "offsets that decrease": (TEXTS, OFFSETS, struct.pack("<3i", 0, 5, 2)),
    "a negative offset": (TEXTS, OFFSETS, struct.pack("<3i", -(1 << 30), 3, 6)),
    "no UTF-8": (TEXTS, b"abcdef", b"abc\xff\xfe\xfd"),
    "offsets of lists": (LISTS, OFFSETS, struct.pack("<3i", 0, 3, 1 << 28)),
    "a dictionary index": (INDICES, struct.pack("<4i", 1, 0, 1, 1), struct.pack("<4i", 1, 0, 9, 1)),
    "a negative dictionary index": (
        INDICES,
        struct.pack("<4i", 1, 0, 1, 1),
        struct.pack("<4i", 1, 0, -(1 << 28), 1),
    ),
}


@pytest.mark.parametrize("what", DAMAGED)
@pytest.mark.parametrize(
    ("read", "write"),
    [(lambda file: arrow_file(file, None), pa.ipc.new_file), (arrow_stream, pa.ipc.new_stream)],
    ids=["file", "stream"],
)
def test_damaged_arrow_data_is_refused_with_its_place(tmp_path, what, read, write):
    values, sound, damaged = DAMAGED[what]
    batch = pa.record_batch({"text": values})
    path = tmp_path / "data.arrow"
    with write(str(path), batch.schema) as writer:
        for _ in range(2):
            writer.write_batch(batch)
    before, after = path.read_bytes().rsplit(sound, 1)
    path.write_bytes(before + damaged + after)
    chunks = read(SourceFile(path.name, path))
    assert len(next(chunks)) == len(batch)
    with pytest.raises(StageError, match=r"data.arrow is damaged in record batch 2: "):
        next(chunks)


def test_parquet_texts_that_are_no_utf8_are_refused_with_their_place(tmp_path):
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"text": TEXTS}), path, compression="none", use_dictionary=False)
    path.write_bytes(path.read_bytes().replace(b"def", b"d\xff\xfe"))
    with pytest.raises(StageError, match=r"data.parquet is damaged in row group 1: "):
        list(parquet(SourceFile(path.name, path), None))
