import bz2
import gzip
import json
import lzma

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.core.errors import ConfigError, StageError
from penstock.core.sources.pin import pin_data
from penstock.prepare.readers import documents
from penstock.prepare.readers.decompress import SourceFile
from tests.stages.prepared import prepare, run, said, table_of, texts, write_lines

TEXT = {"type": "text"}
RECORDS = [{"text": f'line {n}, "quoted" é'} for n in range(5)]


def write_csv(path):
    lines = ["text", *('"' + r["text"].replace('"', '""') + '"' for r in RECORDS)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8-sig")


def write_arrow(path, opened):
    table = pa.Table.from_pylist(RECORDS)
    with opened(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


TEXTS = "\n".join(record["text"] for record in RECORDS)
LINES = "\n\n".join(json.dumps(r) for r in RECORDS).encode()


def write_zst(path):
    with pa.CompressedOutputStream(str(path), "zstd") as stream:
        stream.write(LINES[:50])
    with pa.OSFile(str(path), "ab") as end, pa.CompressedOutputStream(end, "zstd") as stream:
        stream.write(LINES[50:])  # a second frame, as parallel compressors write them


def saved():
    return datasets.Dataset.from_list([{"text": "not meant"}, *RECORDS]).select(range(1, 6))


WRITERS = {
    "a.jsonl": lambda p: p.write_bytes(LINES),
    "a.ndjson": lambda p: p.write_bytes(b"\xef\xbb\xbf" + LINES),
    "a.jsonl.gz": lambda p: p.write_bytes(gzip.compress(LINES[:50]) + gzip.compress(LINES[50:])),
    "a.json.bz2": lambda p: p.write_bytes(bz2.compress(json.dumps(RECORDS).encode())),
    "a.jsonl.xz": lambda p: p.write_bytes(lzma.compress(LINES)),
    "a.jsonl.zst": write_zst,
    "a.json": lambda p: p.write_text(json.dumps(RECORDS, indent=2)),
    "lines.json": lambda p: write_lines(p, RECORDS),
    "a.csv": write_csv,
    "a.parquet": lambda p: pq.write_table(pa.Table.from_pylist(RECORDS), p, row_group_size=2),
    "file.arrow": lambda p: write_arrow(p, pa.ipc.new_file),
    "stream.arrow": lambda p: write_arrow(p, pa.ipc.new_stream),
    "a.txt": lambda p: p.write_text(TEXTS.replace("\n", "\r\n"), "utf-8-sig"),
    "a.txt.gz": lambda p: p.write_bytes(
        gzip.compress("\n".join(r["text"] for r in RECORDS).encode())
    ),
    "saved": lambda p: saved().save_to_disk(p, num_shards=3),
    "splits": lambda p: datasets.DatasetDict({"test": saved(), "train": saved()}).save_to_disk(p),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_samples(tmp_path, name):
    WRITERS[name](tmp_path / name)
    run(prepare((tmp_path / name, TEXT)), tmp_path / "out")
    assert said(table_of(tmp_path / "out")) == [record["text"] for record in RECORDS]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_a_json_document_is_read_alike_in_chunks_of_any_size(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(documents, "CHUNK", chunk)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(RECORDS, indent=1))
    [found] = documents.json_document(SourceFile("a.json", path))
    assert found.values() == RECORDS
    assert found.positions == [2, 5, 8, 11, 14]


BROKEN = {
    "empty.jsonl": (b"", "empty.jsonl is empty"),
    "blank.jsonl": (b"\n\n", "has no records"),
    "header.csv": (b"text\n", "has no records"),
    "cut.parquet": (b"PAR1 and no more", "cut.parquet cannot be read as parquet"),
    "cut.arrow": (b"ARROW1\0\0 and no more", "cut.arrow cannot be read as arrow"),
    "open.json": (b'[{"text": "a"},\n{"text": "b"}', "ends at line 2 with an unclosed array"),
    "bad.json": (b'[{"text": "a"},\n{"text" "b"}]', r"bad\.json:2: not JSON"),
    "bad.csv": (b'text\n"a\n', r"bad\.csv:\d: not CSV"),
    "cut.jsonl.gz": (gzip.compress(LINES)[:-9], r"cut\.jsonl\.gz cannot be decompressed as gzip"),
    "cut.jsonl.xz": (lzma.compress(LINES)[:-9], r"cut\.jsonl\.xz cannot be decompressed as xz"),
    "not.jsonl.zst": (LINES, r"not\.jsonl\.zst cannot be decompressed as zstd"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_read_on_is_named(tmp_path, name):
    content, says = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StageError, match=says):
        run(prepare((tmp_path / name, TEXT)), tmp_path / "out")
    assert not (tmp_path / "out" / "data").exists()


def test_what_save_to_disk_wrote_is_read_as_its_notes_say(tmp_path):
    saved().save_to_disk(tmp_path / "a", num_shards=3)
    (tmp_path / "a" / "cache-1.arrow").write_bytes(b"a cache of the library, no data")
    names = [f"data-0000{n}-of-00003.arrow" for n in range(3)]
    assert [path.name for path in pin_data(str(tmp_path / "a")).paths] == names
    state = json.loads((tmp_path / "a" / "state.json").read_text())
    (tmp_path / "a" / "state.json").write_text(
        json.dumps({**state, "_indices_data_files": [{"filename": "indices.arrow"}]})
    )
    with pytest.raises(ConfigError, match="flatten_indices"):
        pin_data(str(tmp_path / "a"))
    datasets.DatasetDict({"one": saved(), "two": saved()}).save_to_disk(tmp_path / "b")
    assert pin_data(str(tmp_path / "b"), split="two").paths[0].parent.name == "two"
    with pytest.raises(ConfigError, match=r"has the splits one, two.*\n.*Set split"):
        pin_data(str(tmp_path / "b"))
    (tmp_path / "b" / "dataset_dict.json").write_text('{"splits": ["..", "one"]}')
    with pytest.raises(ConfigError, match="does not list splits"):
        pin_data(str(tmp_path / "b"))
    (tmp_path / "b" / "dataset_dict.json").write_text('{"splits": ["one"]}')
    (tmp_path / "b" / "one" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(ConfigError, match="is incomplete"):
        pin_data(str(tmp_path / "b"), split="one")


def test_a_truncated_parquet_file_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(texts(1000)), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(StageError, match=r"a\.parquet cannot be read as parquet"):
        run(prepare((path, TEXT)), tmp_path / "out")


def test_bad_rows_above_the_limit_fail_with_their_places_and_below_it_are_counted(tmp_path):
    lines = [*texts(8), '{"text": ', {"txet": "x"}, {"text": ""}, b"[1]".decode(), {"text": 3}]
    path = write_lines(tmp_path / "a.jsonl", lines)
    with pytest.raises(StageError) as caught:
        run(prepare((path, TEXT), bad_rows_allowed=0.3), tmp_path / "out")
    message = str(caught.value)
    assert "a.jsonl (data.datasets.0): 4 of 13 records (30.77%) cannot be used" in message
    assert "a.jsonl:9: not JSON" in message
    assert "a.jsonl:10: no column 'text'; it has txet; did you mean 'txet'?" in message
    assert "data.bad_rows_allowed" in message
    _, facts = run(prepare((path, TEXT), bad_rows_allowed=0.31), tmp_path / "other")
    assert facts["rows"]["train"] == 8
    assert facts["dropped"] == {
        "empty": 1,
        "invalid_json": 1,
        "missing_column": 1,
        "wrong_type": 2,
    }
    places = [(s["file"], s["line"], s["reason"]) for s in facts["dropped_samples"]]
    assert places[:2] == [("a.jsonl", 9, "invalid_json"), ("a.jsonl", 10, "missing_column")]
    assert facts["sources"][0]["bad"] == 4


def test_a_line_that_is_not_utf8_is_a_bad_row(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "\xff"}\n')
    with pytest.raises(StageError, match=r"a\.jsonl:2: not UTF-8"):
        run(prepare((tmp_path / "a.jsonl", TEXT)), tmp_path / "out")


def test_long_samples_are_cut_and_those_left_without_a_target_are_dropped(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl",
        [
            {"input_ids": [1, 2, 3, 4], "labels": [-100, 2, 3, 4]},
            {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, -100, 4]},
            {"input_ids": [1, 2], "labels": [1, -100]},  # nothing comes before the first token
            {"input_ids": [], "labels": []},
            {"input_ids": [1, 2], "labels": [1, 2]},
        ],
    )
    _, facts = run(prepare((path, {"max_seq_len": 3})), tmp_path / "out")
    table = table_of(tmp_path / "out")
    assert table["input_ids"].to_pylist() == [[1, 2, 3], [1, 2]]
    assert table["row"].to_pylist() == [0, 4]
    assert facts["truncated"] == 1
    assert facts["dropped"] == {"empty": 1, "no_trained_tokens": 2}
    assert facts["tokens"]["train"] == 5
    assert facts["trained_tokens"]["train"] == 3


def test_a_source_of_which_nothing_is_left_fails(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"input_ids": [1, 2], "labels": [-100, -100]}])
    with pytest.raises(StageError, match=r"none of its 1 records gives a sample \(1 no_trained"):
        run(prepare((path, {})), tmp_path / "out")


def test_selected_columns_are_the_only_ones_there(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "x", "body": "y"}])
    body = {"type": "text", "field_text": "body"}
    run(prepare((path, body), select_columns=("body",)), tmp_path / "out")
    with pytest.raises(StageError, match="no column 'body'; it has text"):
        run(prepare((path, body), select_columns=("text",)), tmp_path / "other")
