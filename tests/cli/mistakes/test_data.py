"""What people get wrong in their data: each is told in words they can act on, with its place."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.command import penstock, small_run, told

ROLES = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CHAT = json.dumps({"messages": ROLES}) + "\n"
SYSTEM = json.dumps({"messages": [{"role": "system", "content": "a"}]}) + "\n"
BLANK = json.dumps({"messages": [ROLES[0], {"role": "assistant", "content": ""}]}) + "\n"


def line(**record: Any) -> str:
    """A line of JSON."""
    return json.dumps(record) + "\n"


def table(**columns: list[Any]) -> bytes:
    """A parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


DATA: dict[str, tuple[str | bytes, str, dict[str, Any], str]] = {
    "an empty file": ("", "d.jsonl", {}, "d.jsonl is empty"),
    "a broken line": (5 * CHAT + "{oops\n", "d.jsonl", {}, "d.jsonl:6: not JSON"),
    "a comma too many": ('{"text": "a",}\n', "d.jsonl", {}, "take it out"),
    "UTF-16": (CHAT.encode("utf-16"), "d.jsonl", {}, "iconv -f UTF-16"),
    "Latin-1": ('{"text": "é"}\n'.encode("latin-1"), "d.jsonl", {"type": "text"}, "not UTF-8"),
    "no answers": (
        '{"messages": [{"role": "user", "content": "a"}]}\n',
        "d.jsonl",
        {},
        "nothing in it is the assistant's",
    ),
    "a misspelt role": (CHAT.replace("assis", "asis"), "d.jsonl", {}, "did you mean 'assistant'?"),
    "another type": (CHAT, "d.jsonl", {"type": "instruction"}, "They look like type: chat"),
    "a type that is none": (CHAT, "d.jsonl", {"type": "chatt"}, "did you mean chat?"),
    "a misspelt column": ('{"txt": "a"}\n', "d.jsonl", {"type": "text"}, "did you mean 'txt'?"),
    "numbers for text": ('{"text": 5}\n', "d.jsonl", {"type": "text"}, "text is a number"),
    "two kinds of records": (CHAT + '{"text": "x"}\n', "d.jsonl", {}, "its records fit 2 types"),
    "one bad record of many": ('[{"text": "a"}, {"tex": "b"}]', "d.json", {}, "record 2"),
    "an archive": ("PK", "d.zip", {}, "is an archive, which is not read"),
    "a cut archive": (b"\x1f\x8bjunk", "d.jsonl.gz", {}, "cannot be decompressed as gzip"),
    "a cut table": (b"PAR1junkPAR1", "d.parquet", {"type": "text"}, "cannot be read as parquet"),
    "pairs that are none": (CHAT, "d.jsonl", {"type": "preference"}, "train.objective: preference"),
    "a blank file": ("\n\n\n", "d.jsonl", {}, "has no records"),
    "messages as text": (line(messages="Hi"), "d.jsonl", {}, "A conversation is a list of"),
    "messages as text, typed": (
        line(messages="Hi"),
        "d.jsonl",
        {"type": "chat"},
        "messages is text where a list of messages is meant",
    ),
    "system alone": (SYSTEM, "d.jsonl", {}, "nothing in it is the assistant's"),
    "no header": ("What?,A dog\n" * 3, "d.csv", {}, "The first line of a CSV file names"),
    "columns of a language": ("frage;antwort\nw;a\n", "d.csv", {}, "they have frage, antwort"),
    "a column twice": ("text,text\na,b\n", "d.csv", {}, "two columns named 'text'"),
    "a ragged table": ("instruction,output\na,b\nc,d,e\n", "d.csv", {}, "3 fields where"),
    "gzip by another name": (
        gzip.compress(CHAT.encode()),
        "d.jsonl",
        {},
        "Rename it to d.jsonl.gz",
    ),
    "text called gzip": (CHAT, "d.jsonl.gz", {}, "Not a gzipped file"),
    "parquet by another name": (table(text=["a"]), "d.jsonl", {}, "Write ds_type: parquet"),
    "JSON called a table": (CHAT, "d.csv", {}, "Write ds_type: json"),
    "a table called JSON": ("text\nabc\n", "d.jsonl", {}, "it starts with 'text'"),
    "parquet without the column": (
        table(content=["a"]),
        "d.parquet",
        {"type": "text"},
        "did you mean 'content'?",
    ),
    "a web page": ("<!DOCTYPE html><html></html>", "d.jsonl", {}, "is a web page"),
    "a pointer": ("version https://git-lfs.github.com/spec/v1\n", "d.jsonl", {}, "git lfs pull"),
    "a spreadsheet": ("PK", "d.xlsx", {}, "Save the table as CSV"),
    "a zip by another name": (b"PK\x03\x04rest", "d.csv", {}, "a zip archive"),
    "a pickle": ("x", "d.pkl", {}, "that can run code"),
    "nested lists": (line(text=["a", ["b"]]), "d.jsonl", {"type": "text"}, "text[1] is a list"),
    "NaN": ('{"text": NaN}\n', "d.jsonl", {"type": "text"}, "text is a number where a string"),
    "null": ('{"text": null}\n', "d.jsonl", {"type": "text"}, "text is null where a string"),
    "blank texts": (line(text="  "), "d.jsonl", {}, "text is empty"),
    "single quotes": ("{'text': 'a'}\n", "d.jsonl", {}, "JSON has double ones"),
    "a raw line break": ('{"text": "a\nb"}\n', "d.jsonl", {}, "within quotes write \\n"),
    "a cut line": (CHAT * 3 + CHAT[:20], "d.jsonl", {}, "d.jsonl:4: not JSON: Unterminated"),
    "a cut array": ('[{"text": "a"}, {"text": ', "d.json", {}, "d.json:1: not JSON"),
    "a list of texts": ('["a", "b"]', "d.json", {}, "where an object is meant"),
    "everything below data and more": (
        '{"data": [{"text": "a"}], "more": [{"text": "b"}]}',
        "d.json",
        {},
        "they have data, more",
    ),
    "roles of ShareGPT": (
        CHAT.replace('"user"', '"human"'),
        "d.jsonl",
        {},
        "known are system, developer, user",
    ),
    "ShareGPT as chat": (
        line(conversations=[{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]),
        "d.jsonl",
        {"type": "chat"},
        "They look like type: sharegpt",
    ),
    "a message without content": (
        line(messages=[ROLES[0], {"role": "assistant"}]),
        "d.jsonl",
        {},
        "messages[1] has no content",
    ),
    "a number for content": (
        line(messages=[ROLES[0], {"role": "assistant", "content": 5}]),
        "d.jsonl",
        {},
        "messages[1].content is a number",
    ),
    "a column that is not there": (CHAT, "d.jsonl", {"field_messages": "x"}, "they have messages"),
    "tokens beyond the vocabulary": (
        line(input_ids=[1, 99999], labels=[1, 99999]),
        "d.jsonl",
        {},
        "the vocabulary has tokens 0 to 258",
    ),
    "labels of another length": (
        line(input_ids=[1, 2], labels=[1]),
        "d.jsonl",
        {},
        "input_ids has 2 entries and labels 1",
    ),
    "tokens as text": (line(input_ids=["1"], labels=[1]), "d.jsonl", {}, "not a whole number"),
    "nothing to learn": (line(input_ids=[1], labels=[-100]), "d.jsonl", {}, "is trained"),
    "pairs for another objective": (
        line(prompt="a", chosen="b", rejected="c"),
        "d.jsonl",
        {},
        "write train.objective: preference",
    ),
    "null for a record": (CHAT * 3 + "null\n" + CHAT, "d.jsonl", {}, "the record is null"),
    "null in an array": (f"[{CHAT}, null]", "d.json", {}, "the record is null"),
    "a key twice": (
        CHAT + CHAT.replace('"content": "Hi"', '"content": "a", "content": "b"'),
        "d.jsonl",
        {},
        "key 'content' is there 2 times",
    ),
    "a key twice in an array": (
        '[{"text": "a"},\n{"text": "b", "text": "c"}]',
        "d.json",
        {},
        "d.json:2",
    ),
    "UTF-32": (CHAT.encode("utf-32"), "d.jsonl", {}, "iconv -f UTF-32"),
    "a split of files": (CHAT, "d.jsonl", {"split": "trian"}, "leave split out"),
    "a subset of files": (CHAT, "d.jsonl", {"name": "en"}, "Leave name out"),
}

NOTICED: dict[str, tuple[str, dict[str, Any], str]] = {
    "empty answers": (BLANK * 3, {}, "3 of 3 records train an empty answer"),
    "some without an answer": (SYSTEM + CHAT * 9, {}, "1 of 10 records give no sample"),
    "an input that is not read": (
        line(instruction="a", input="b", output="c") * 9,
        {"type": "instruction"},
        "write type: alpaca, which reads it",
    ),
}

READ = {
    "a byte order mark": b"\xef\xbb\xbf" + CHAT.encode() * 3,
    "line ends of Windows": (CHAT * 3).replace("\n", "\r\n").encode(),
    "objects over several lines": json.dumps(json.loads(CHAT), indent=2).encode() * 3,
    "lines with commas between them": CHAT.strip().encode() + b",\n" + CHAT.encode(),
    "messages as JSON in text": line(messages=json.dumps(ROLES)).encode() * 3,
    "the same id twice": line(id=1, text="abc").encode() * 3,
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("mistake", DATA)
def test_data_that_cannot_be_read_is_told_with_its_place(mistake, tmp_path):
    content, name, settings, expected = DATA[mistake]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    sections = {"data": {"datasets": [{"path": name, **settings}]}}
    said = penstock("prepare", small_run(tmp_path, **sections))
    told(said.code, said.err, expected)
    assert not list(tmp_path.rglob("MANIFEST.json"))


@pytest.mark.parametrize("mistake", NOTICED)
def test_records_that_teach_nothing_or_in_part_are_counted(mistake, tmp_path):
    content, settings, expected = NOTICED[mistake]
    (tmp_path / "d.jsonl").write_text(content)
    sections = {"data": {"datasets": [{"path": "d.jsonl", **settings}]}}
    said = penstock("prepare", small_run(tmp_path, **sections))
    assert said.code == 0, said.err
    assert expected in said.err


@pytest.mark.parametrize("form", READ)
def test_harmless_forms_are_read(form, tmp_path):
    (tmp_path / "d.jsonl").write_bytes(READ[form])
    said = penstock("check", small_run(tmp_path, data={"datasets": [{"path": "d.jsonl"}]}))
    assert said.code == 0, said.err


@pytest.mark.parametrize(("count", "share"), [(1, 0.1), (12, 100)])
def test_more_samples_held_out_than_there_are_is_told(count, share, tmp_path):
    (tmp_path / "d.jsonl").write_text(CHAT * count)
    data = {"datasets": [{"path": "d.jsonl"}], "val_set_size": share}
    said = penstock("prepare", small_run(tmp_path, data=data))
    told(said.code, said.err, f"Set data.val_set_size ({share}) lower")


@pytest.mark.parametrize("name", ["dd", "*.nothing"])
def test_a_folder_or_pattern_without_data_is_told_with_what_is_there(name, tmp_path):
    (tmp_path / "dd").mkdir()
    (tmp_path / "dd" / "README.md").write_text("x")
    said = penstock("check", small_run(tmp_path, data={"datasets": [{"path": name}]}))
    told(said.code, said.err, "It holds README.md" if name == "dd" else "matches no file")
