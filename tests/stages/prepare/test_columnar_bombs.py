"""Columnar files are judged by what they claim, before memory is taken for it."""

import io
import random
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.prepare.readers import row_groups
from penstock.prepare.readers.columnar import arrow_file, drop_nulls, parquet
from penstock.prepare.readers.decompress import SourceFile
from penstock.prepare.readers.parquet_pages import column_chunks, read_checked_codecs
from tests.stages.prepare import bombs

READ = """if True:
    import resource, sys, time
    from pathlib import Path
    from penstock.core.errors import StageError
    from penstock.prepare.readers import columnar
    from penstock.prepare.readers.decompress import SourceFile
    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    # Allocators reserve addresses by the gigabyte.
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    before = peak()
    for name in sys.argv[1:]:
        path, start = Path(name), time.monotonic()
        file = SourceFile(path.name, path)
        read = columnar.parquet if path.suffix == ".parquet" else columnar.arrow_file
        try:
            for chunk in read(file, None):
                chunk.values()
            print(path.name, "read")
        except StageError as error:
            is_named = path.name in str(error) and ("bytes" in str(error) or "limit" in str(error))
            is_cheap = time.monotonic() - start < 10 and peak() - before < 1 << 30
            print(path.name, "refused" if is_named and is_cheap else f"{peak() - before} {error}")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "makers",
    [
        bombs.CHEAP,
        pytest.param(bombs.DEAR, marks=pytest.mark.exhaustive),
    ],
    ids=["cheap", "dear"],
)
def test_a_small_file_that_stands_for_much_is_refused_before_memory_is_taken(tmp_path, makers):
    paths = []
    for make, suffix in makers.items():
        paths.append(tmp_path / f"{make.__name__}.{suffix}")
        paths[-1].write_bytes(make())
    words = [sys.executable, "-c", READ, *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [f"{path.name} refused" for path in paths], done.stderr


def draw_table(draw, rows):
    def text():
        return draw.choice(["a" * draw.randrange(300), str(draw.random()), "é", "", None])

    def texts():
        return None if draw.random() < 0.1 else [text() for _ in range(draw.randrange(5))]

    columns = {
        "text": [text() for _ in range(rows)],
        "ids": [draw.choice([None, list(range(draw.randrange(40)))]) for _ in range(rows)],
        "texts": [texts() for _ in range(rows)],
        "nested": [[texts() for _ in range(draw.randrange(4))] for _ in range(rows)],
        "messages": [
            [{"role": "user", "content": text()} for _ in range(draw.randrange(4))]
            for _ in range(rows)
        ],
        "number": [draw.randrange(9) for _ in range(rows)],
    }
    return pa.table(columns)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [row_groups.BATCH_MEMORY, 1, 2000])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_files_of_all_encodings_are_read_as_pyarrow_reads_them(
    tmp_path, monkeypatch, memory, version
):
    monkeypatch.setattr(row_groups, "BATCH_MEMORY", memory)
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    for codec in ("none", "snappy", "gzip", "brotli", "zstd", "lz4"):
        table = draw_table(draw, 150)
        path = tmp_path / "data.parquet"
        pq.write_table(
            table,
            path,
            compression=codec,
            data_page_version=version,
            use_dictionary=draw.random() < 0.7,
            dictionary_pagesize_limit=draw.choice([1 << 20, 200]),
            data_page_size=draw.choice([1 << 20, 100]),
            write_batch_size=draw.choice([1, 1000]),
            row_group_size=70,
        )
        chunks = list(parquet(SourceFile(path.name, path), None))
        rows = [row for chunk in chunks for row in chunk.values()]
        assert rows == [drop_nulls_of_structs(row) for row in table.to_pylist()]
        assert [n for chunk in chunks for n in chunk.positions] == list(range(1, 151))


def drop_nulls_of_structs(row):
    return {**row, "messages": drop_nulls(row["messages"])}


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_the_longest_row_of_a_column_is_known_from_its_levels(version):
    draw = random.Random(7)
    rows = [[list(range(draw.randrange(9))) for _ in range(draw.randrange(9))] for _ in range(300)]
    rows[200] = [list(range(500))] * 3
    for page in (1 << 20, 64):
        out = io.BytesIO()
        table = pa.table({"ids": rows})
        pq.write_table(table, out, data_page_version=version, data_page_size=page)
        file = pq.ParquetFile(out)
        [column] = column_chunks(file, 0, out, read_checked_codecs(out, file)[0])
        # An empty list has one entry of levels.
        longest = max(sum(max(1, len(part)) for part in row) or 1 for row in rows)
        assert column.longest_row(out)[0] == longest == 1500
        assert column.num_values == sum(sum(max(1, len(p)) for p in row) or 1 for row in rows)


def test_arrow_types_of_all_kinds_are_read_as_pyarrow_reads_them(tmp_path):
    texts = ["a", None, "ccc", ""]
    arrays = {
        "views": pa.array(texts, pa.string_view()),
        "large": pa.array(texts, pa.large_string()),
        "dictionary": pa.array(texts).dictionary_encode(),
        "lists": pa.array([["a"], None, [], ["b", None]], pa.large_list(pa.string())),
        "list_views": pa.array([[1], None, [], [2, 3]], pa.list_view(pa.int64())),
        "fixed": pa.array([["a", "b"], None, ["c", "d"], ["e", None]], pa.list_(pa.string(), 2)),
        "pairs": pa.array([[1, 2], None, [3, 4], [5, 6]], pa.list_(pa.int8(), 2)),
        "map": pa.array([[("a", "b")], None, [], [("c", "d")]], pa.map_(pa.string(), pa.string())),
        "runs": pa.RunEndEncodedArray.from_arrays(pa.array([3, 4], pa.int32()), ["a", "b"]),
        "bytes": pa.array([b"ab", None, b"cd", b"ef"], pa.binary(2)),
        "null": pa.nulls(4),
        "truth": pa.array([True, None, False, True]),
    }
    batch = pa.record_batch(arrays)
    path = tmp_path / "data.arrow"
    for part in (batch, batch.slice(1), batch.slice(2, 1)):
        for codec in (None, "zstd", "lz4"):
            path.write_bytes(bombs.arrow_file(part, compression=codec))
            chunks = list(arrow_file(SourceFile(path.name, path), None))
            assert [row for chunk in chunks for row in chunk.values()] == part.to_pylist()
