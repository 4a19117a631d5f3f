"""No record takes more memory than `data.max_record_bytes` allows."""

import gzip
import io
import json
import tarfile
import time

import pytest

from penstock.config.loading.load import loads
from penstock.core.errors import StageError
from penstock.pipeline.plan import dataset_settings
from penstock.prepare.bad_records import BadRecord
from penstock.prepare.readers.decompress import SourceFile
from penstock.prepare.readers.documents import csv_rows
from penstock.prepare.readers.lines import parse_line
from tests.stages.prepared import prepare, run, table_of

LONG = "word " * 600_000
"""3 MB: more than a reader's block."""


LINES = b'{"text": "a"}\n' + json.dumps({"text": LONG}).encode() + b"\n"


def archive(path):
    content = json.dumps({"text": LONG}).encode()
    with tarfile.open(path, "w") as out:
        info = tarfile.TarInfo("0.json")
        info.size = len(content)
        out.addfile(info, io.BytesIO(content))


FILES = {
    "data.jsonl": (lambda path: path.write_bytes(LINES), "the line at byte 15"),
    "data.jsonl.gz": (lambda path: path.write_bytes(gzip.compress(LINES)), "the line at byte 15"),
    "data.txt": (lambda path: path.write_text("a\n" + LONG + "\n"), "the line at byte 3"),
    "data.csv": (lambda path: path.write_text("text\na\n" + LONG + "\n"), "line 3"),
    "data.json": (
        lambda path: path.write_text(json.dumps([{"text": "a"}, {"text": LONG}])),
        "the value at line 1",
    ),
    "data.tar": (archive, "record 1, up to member 1"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_record_that_is_too_large_is_refused_with_its_place(tmp_path, name):
    write, place = FILES[name]
    path = tmp_path / name
    write(path)
    text = {"type": "text", "max_seq_len": 8}
    with pytest.raises(StageError, match=rf"{name}: {place} has more than 2,000,000 bytes"):
        run(prepare((path, {**text, "max_record_bytes": 2_000_000})), tmp_path / "out")
    artifact, _ = run(prepare((path, text)), tmp_path / "whole")
    assert len(table_of(artifact.path)) == (1 if name == "data.tar" else 2)


def test_an_array_in_one_line_may_be_larger_than_a_record(tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{"text": "a" * 900_000}] * 3))
    text = {"type": "text", "max_seq_len": 8, "max_record_bytes": 1_000_000}
    artifact, _ = run(prepare((path, text)), tmp_path / "out")
    assert len(table_of(artifact.path)) == 3


def test_the_bound_that_is_written_arrives_and_is_in_no_key():
    run = loads(
        {
            "model": {"config_path": "builtin:tiny-qwen3"},
            "data": {"datasets": [{"path": "dummy"}], "max_record_bytes": 4321},
            "train": {"output_dir": "o"},
        }
    )
    settings = dataset_settings(run, run.data.datasets[0], "train")
    assert settings.max_record_bytes == 4321
    assert "max_record_bytes" not in settings.model_dump()


def test_a_table_of_very_many_columns_is_read_in_seconds(tmp_path):
    path = tmp_path / "data.csv"
    names = [f"c{number}" for number in range(100_000)]
    path.write_text(f"{','.join(names)}\n{',1' * 99_999}\n")
    start = time.monotonic()
    [chunk] = csv_rows(SourceFile(path.name, path))
    [row] = chunk.values()
    assert isinstance(row, dict)
    assert list(row) == names
    path.write_text(f"{','.join([*names, 'c99999'])}\n")
    with pytest.raises(StageError, match=r"two columns named 'c99999'"):
        list(csv_rows(SourceFile(path.name, path)))
    twice = b"{" + b", ".join(b'"%s": 1' % name.encode() for name in [*names, "c99999"]) + b"}"
    assert isinstance(fault := parse_line(twice), BadRecord)
    assert "key 'c99999' is there 2 times" in fault.why
    assert time.monotonic() - start < 10
