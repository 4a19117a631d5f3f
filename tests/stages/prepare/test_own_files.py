"""Files as people have them: each is read as it was meant, or refused in one line with a remedy."""

import json

import pytest

from penstock.core.errors import StageError
from penstock.prepare.bad_records import EXAMPLES_PER_CAUSE, BadRecord, Tally, format_causes
from penstock.prepare.notices import data_warnings
from tests.stages.prepared import prepare, run, write_lines

TEXT = {"type": "text"}
RECORDS = [{"text": f"line {n}"} for n in range(6)]
CHAT = {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}


def lines(records):
    return "".join(f"{json.dumps(record)}\n" for record in records)


READ = {
    "array.jsonl": json.dumps(RECORDS),
    "pretty_array.jsonl": json.dumps(RECORDS, indent=1),
    "pretty.jsonl": "".join(f"{json.dumps(record, indent=2)}\n" for record in RECORDS),
    "commas.jsonl": "".join(f"{json.dumps(record)},\n" for record in RECORDS),
    "bom.jsonl": "\ufeff" + lines(RECORDS),
    "lines.json": lines(RECORDS),
    "semicolons.csv": "text;n\n" + "".join(f"line {n};1\n" for n in range(6)),
    "tabs.tsv": "text\tn\n" + "".join(f"line {n}\t1\n" for n in range(6)),
    "one_line.json": json.dumps(RECORDS),
    "data.json": json.dumps({"version": 1, "data": RECORDS}),
    "train.json": json.dumps({"train": RECORDS}, indent=1),
    "data_line.jsonl": json.dumps({"data": RECORDS}) + "\n",
    "bom_array.json": "\ufeff" + json.dumps(RECORDS),
    "commas_within.csv": 'text,n\n"line 0",1\n' + "".join(f"line {n},;\n" for n in range(1, 6)),
}


@pytest.mark.parametrize("name", READ)
def test_a_file_is_read_by_what_is_in_it(tmp_path, name):
    (tmp_path / name).write_text(READ[name], encoding="utf-8")
    _, facts = run(prepare((tmp_path / name, TEXT)), tmp_path / "out")
    assert facts["rows"]["train"] == len(RECORDS)
    assert facts["dropped"] == {}


TURNS = CHAT["messages"]
SPOKEN = [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}]
LISTS = {
    "chat.jsonl": f"{json.dumps(TURNS)}\n" * 6,
    "chat.json": f"\n{json.dumps(TURNS)}\n\n" * 6,
    "chats.json": json.dumps([TURNS] * 6),
    "sharegpt.jsonl": f"{json.dumps(SPOKEN)}\n" * 6,
    "in_data.json": json.dumps({"data": [CHAT] * 6}),
    # One record, whose list has a usual name of all records.
    "record.json": json.dumps({"data": TURNS}),
    "records.jsonl": f"{json.dumps({'data': [{'x': 1}], **CHAT})}\n" * 6,
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_messages_is_a_record(tmp_path, name):
    (tmp_path / name).write_text(LISTS[name])
    its = {"type": "sharegpt" if "sharegpt" in name else "chat"}
    if name == "record.json":
        its["field_messages"] = "data"
    _, facts = run(prepare((tmp_path / name, its)), tmp_path / "out")
    assert facts["rows"]["train"] == (1 if name == "record.json" else 6)
    assert facts["dropped"] == {}


REFUSED = {
    "utf16.jsonl": (lines(RECORDS).encode("utf-16"), "utf16.jsonl is UTF-16.*\n.*iconv"),
    "utf16.csv": ("text\nhello there\n".encode("utf-16-le"), "utf16.csv is UTF-16"),
    "latin.jsonl": (
        "".join(f'{{"text": "caf\xe9 {n}"}}\n' for n in range(6)).encode("latin-1"),
        r"6 x not UTF-8: .*; save the file as UTF-8 \(latin.jsonl:1, latin.jsonl:2, "
        r"latin.jsonl:3, …\)",
    ),
    "trailing.jsonl": (b'{"text": "a",}\n' * 4, "4 x not JSON: a comma before } at column 14"),
    "trailing_in_list.jsonl": (b'  {"text": ["a" , ]}\n' * 4, "a comma before ] at column 19"),
    "two.jsonl": (b'{"text": "a"} {"text": "b"}\n' * 3, "a second record at column 15"),
    "quotes.jsonl": (b"{'text': 'a'}\n" * 3, "not JSON: single quotes at column 2"),
    "comments.jsonl": (b'{"text": "a"}\n// b\n', "a comment at column 1, which JSON does not"),
    "comments.json": (
        b'[{"text": "a"}, # b\n]',
        r"json:1: not JSON: a comment, which JSON",
    ),
    "two_arrays.json": (b'[{"text": "a"}]\n[{"text": "b"}]', "2: there is more after the array"),
    "two_splits.json": (
        json.dumps({"train": RECORDS, "test": RECORDS}).encode(),
        "no column 'text'; it has train, test",
    ),
    "no_header.csv": (
        b'"{""role"": ""user""}",x\n',
        'no_header.csv has no header: its first line has \'{"role"',
    ),
    "no_header_either.csv": (
        b"one that is much longer " * 3 + b",x\n",
        "no_header_either.csv has no header: its first line has 'one that",
    ),
    "array.json": (
        json.dumps([{"text": n % 2 or "a"} for n in range(8)]).encode(),
        r"4 x text is a number .* \(array.json, records 2, 4, 6, …\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_told_once_with_its_remedy(tmp_path, name):
    content, told = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StageError, match=told) as caught:
        run(prepare((tmp_path / name, TEXT)), tmp_path / "out")
    assert len(str(caught.value).splitlines()) <= 4


def test_a_type_that_does_not_fit_is_told_with_the_one_that_does(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [CHAT] * 3)
    with pytest.raises(StageError, match="They look like type: chat"):
        run(prepare((path, {"type": "sharegpt"})), tmp_path / "out")


def test_faults_of_one_cause_are_one_line_in_whatever_places_they_stand():
    tallies = [Tally(), Tally()]
    for number in range(40):
        why = f"messages[{number % 7}] has no content; it has role"
        tallies[number % 2].drop_record("a.jsonl", number + 1, BadRecord("missing_column", why))
    tallies[0].drop_record("a.jsonl", 99, BadRecord("invalid_json", "not JSON: at column 3"))
    total = Tally.total(map(Tally.from_json, (tally.as_json() for tally in tallies)))
    first, second = format_causes(total.samples, total.causes).splitlines()
    assert first.startswith("    40 x messages[")
    assert first.count("a.jsonl:") == EXAMPLES_PER_CAUSE
    assert second == "    a.jsonl:99: not JSON: at column 3"


def test_records_without_answers_and_columns_in_vain_are_told_with_their_counts(tmp_path):
    blank = {"messages": [CHAT["messages"][0], {"role": "assistant", "content": " "}]}
    silent = {"messages": [{"role": "system", "content": "x"}]}
    records = [CHAT, CHAT, {**CHAT, "system": "brief", "reasoning": ""}, blank, silent]
    path = write_lines(tmp_path / "a.jsonl", records)
    _, facts = run(prepare((path, {"type": "chat"})), tmp_path / "out")
    dropped, empty, unread = data_warnings(facts)
    assert "1 of 5 records give no sample: 1 without an answer to train on" in dropped
    assert "1 of 5 records train an empty answer" in empty
    assert "1 of 5 records have 'system'" in unread
    assert "write field_system: system" in unread


def test_records_that_begin_with_the_assistant_are_told_in_one_line_with_their_count(tmp_path):
    first = {"messages": [{"role": "assistant", "content": "0"}, *CHAT["messages"]]}
    pair = {
        "prompt": [{"role": "assistant", "content": "0"}, CHAT["messages"][0]],
        "chosen": "a",
        "rejected": "b",
    }
    for name, kind, records in (
        ("chat", "chat", [CHAT, first, first]),
        ("pairs", "preference", [pair]),
    ):
        path = write_lines(tmp_path / f"{name}.jsonl", records)
        _, facts = run(prepare((path, {"type": kind})), tmp_path / name / "out")
        [line] = data_warnings(facts)
        count, total = (2, 3) if kind == "chat" else (1, 1)
        assert f"{count} of {total} records start with an assistant message" in line
    path = write_lines(tmp_path / "usual.jsonl", [CHAT])
    _, facts = run(prepare((path, {"type": "chat"})), tmp_path / "usual" / "out")
    assert list(data_warnings(facts)) == []


@pytest.mark.parametrize(
    ("its", "told"),
    [
        ({"type": "instruction"}, ["input", "history"]),
        ({"type": "instruction", "field_input": "input"}, ["history"]),
        ({"type": "alpaca"}, []),
    ],
    ids=str,
)
def test_an_input_is_read_or_told(tmp_path, its, told):
    record = {"instruction": "a", "input": "b", "history": [["c", "d"]], "output": "e"}
    path = write_lines(tmp_path / "a.jsonl", [record] * 4)
    _, facts = run(prepare((path, its)), tmp_path / "out")
    assert facts["sources"][0]["unread"] == dict.fromkeys(told, 4)
