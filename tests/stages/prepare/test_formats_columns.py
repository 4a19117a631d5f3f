"""Records of any sort: under other names, and with anything at all in their columns."""

import csv
import json
import re
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.extensions import FORMATS
from penstock.prepare.bad_records import BadRecord
from penstock.prepare.formats.conversation import Conversation, PreferencePair, RatedCompletion
from penstock.prepare.readers.columnar import drop_nulls, parquet
from penstock.prepare.readers.decompress import SourceFile
from penstock.prepare.readers.documents import csv_rows
from tests.conftest import ROOT
from tests.stages.prepare.conversations import ASKED, GOOD, LONG, expected, parse, said, told

# Records under the usual names of their columns, and what is there instead when a field says that
# the right thing is elsewhere. `None` as a default: the record may lack the column.
OTHERWISE: list[dict[str, Any]] = [said("user", "wrong"), said("assistant", "wrong")]
RECORDS: dict[str, dict[str, tuple[Any, Any]]] = {
    # column: (its value, a decoy)
    "chat": {
        "messages": ([*ASKED, GOOD], OTHERWISE),
        "tools": ([{"name": "f"}], [{"name": "g"}]),
        "system": ("count", "wrong"),
        "label": ([1], [0]),
    },
    "sharegpt": {
        "messages": (told([*ASKED, GOOD]), told(OTHERWISE)),
        "tools": ([{"name": "f"}], [{"name": "g"}]),
        "system": ("count", "wrong"),
    },
    "alpaca": {
        "instruction": ("2 + 2?", "wrong"),
        "input": ("ten", "wrong"),
        "output": ("4", "wrong"),
        "system": ("count", "wrong"),
    },
    "preference": {
        "prompt": ("2 + 2?", "wrong"),
        "chosen": ("4", "wrong"),
        "rejected": ("5", "worse"),
        "tools": ([{"name": "f"}], [{"name": "g"}]),
        "system": ("count", "wrong"),
    },
    "kto": {
        "prompt": ("2 + 2?", "wrong"),
        "completion": ("4", "wrong"),
        "label": (True, False),
        "tools": ([{"name": "f"}], [{"name": "g"}]),
        "system": ("count", "wrong"),
    },
    "sft_turns": {"system": ("count", "wrong")},
    "preference_turns": {"system": ("count", "wrong")},
}
FIXED = {
    "sft_turns": {"src": "2 + 2?", "tgt": "4"},
    "preference_turns": {"src": "2 + 2?", "response": ["4", "5"], "sort": [1, 0]},
}
USUAL = {("sharegpt", "messages"): "conversations"}


@pytest.mark.parametrize(
    ("kind", "moved"), [(kind, name) for kind, columns in RECORDS.items() for name in columns]
)
def test_a_column_is_read_where_its_field_says(kind, moved):
    columns, fixed = RECORDS[kind], FIXED.get(kind, {})
    names = {name: USUAL.get((kind, name), name) for name in columns}
    reads = {"field_system": "system"} if "system" in columns else {}
    usual = {names[name]: value for name, (value, _) in columns.items()} | fixed
    wanted = parse(usual, type=kind, **reads)
    decoy = {**usual, names[moved]: columns[moved][1]}
    assert parse(decoy, type=kind, **reads) != wanted
    elsewhere = {**decoy, "elsewhere": columns[moved][0]}
    assert parse(elsewhere, type=kind, **{**reads, f"field_{moved}": "elsewhere"}) == wanted


@pytest.mark.parametrize("kind", ["preference", "kto"])
def test_a_prompt_may_be_the_conversation_in_the_column_that_is_named(kind):
    answers = {"chosen": "4", "rejected": "5", "completion": "4", "label": True}
    record = {**answers, "mine": told(LONG), "messages": OTHERWISE}
    found = parse(record, type=kind, field_messages="mine")
    conversation = found.chosen if kind == "preference" else found.conversation
    assert conversation == expected(LONG)


@pytest.mark.parametrize("kind", ["chat", "sharegpt", "preference", "kto"])
def test_lists_in_a_csv_or_in_columns_of_strings_are_read_as_json(kind, tmp_path):
    name = "messages" if kind == "chat" else "conversations"
    lists: dict[str, Any] = {name: [*LONG, GOOD] if kind == "chat" else told([*LONG, GOOD])}
    lists["tools"] = [{"name": "f", "parameters": {"größe": [1, None]}}]
    if kind == "chat":
        lists["label"] = [0, 1]
    others = {"preference": {"rejected_response": "5"}, "kto": {"label": "0"}}.get(kind, {})
    texts = {column: json.dumps(value, indent=1) for column, value in lists.items()} | others
    wanted = parse({**lists, **others}, type=kind)
    with (tmp_path / "data.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, texts)
        writer.writeheader()
        writer.writerow(texts)
    pq.write_table(pa.Table.from_pylist([texts]), tmp_path / "data.parquet")
    for file, read in (("data.csv", csv_rows), ("data.parquet", lambda at: parquet(at, None))):
        [chunk] = read(SourceFile(file, tmp_path / file))
        assert [parse(record, type=kind) for record in chunk.values()] == [wanted]


def test_every_example_in_the_documents_can_be_read():
    document = (ROOT / "docs" / "reference" / "dataset-formats.md").read_text()
    found = re.findall(r"^### `(\w+)`\n(.*?)(?=^##)", document, flags=re.DOTALL | re.MULTILINE)
    assert {kind for kind, _ in found} == set(FORMATS.builtins)
    for kind, section in found:
        examples = "".join(re.findall(r"^```json\n(.*?)^```$", section, re.DOTALL | re.MULTILINE))
        records = [json.loads(line) for line in examples.splitlines()]
        assert records
        for record in records:
            parse(record, type=kind)


CALL = {"name": "f", "arguments": {"x": [1]}}
RICH = [
    {"role": "system", "content": [{"type": "text", "text": "s"}]},
    {"role": "user", "content": "u", "name": "me"},
    {"role": "assistant", "content": None, "weight": 0, "tool_calls": [{"function": CALL}]},
    {"role": "tool", "content": [{"x": 1.5}], "tool_call_id": "c"},
    {"from": "human", "value": "u"},
    {"from": "function_call", "value": '{"name": "f", "arguments": "{}"}'},
    {"from": "gpt", "value": "a", "reasoning_content": "r"},
]
SPOKEN = [message for message in RICH if "role" in message]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}, '{"name": "g"}']
WHOLE = {
    "chat": {"messages": [*SPOKEN, GOOD], "tools": TOOLS, "label": [1, 0]},
    "sharegpt": {"conversations": RICH, "tools": TOOLS, "system": "s"},
    "instruction": {"instruction": "q", "output": "a"},
    "alpaca": {"instruction": "q", "input": "i", "output": "a", "history": [["q", "a"]]},
    "preference": {"prompt": SPOKEN, "chosen": [*SPOKEN, GOOD], "rejected": {"messages": RICH}},
    "kto": {"messages": RICH, "label": True, "tools": TOOLS},
    "sft_turns": {"src": ["s", "q"], "tgt": ["", "a"], "label": [0, 1], "is_system": 1},
    "preference_turns": {"src": ["q"], "response": [["a", "q", "a"], "b"], "sort": [1, 0]},
}
VALUES = st.sampled_from(
    [
        *("system", "user", "assistant", "human", "gpt", "function_call", "tool", "x", "\ud800"),
        *('[{"name": "f"}]', '{"name": "f", "arguments": {}}', " ", [GOOD], GOOD, *RICH),
    ]
)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | VALUES | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def places(value, at=()):
    """The path of every value inside a value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for name, part in inside:
        yield (*at, name)
        if isinstance(part, dict | list):
            yield from places(part, (*at, name))


def put(value, path, part):
    """A copy of `value` with `part` at the path; without what is there, where `part` is GONE."""
    copy = value.copy()
    name, *rest = path
    if rest:
        copy[name] = put(copy[name], rest, part)
    elif part == GONE:
        del copy[name]
    else:
        copy[name] = part
    return copy


GONE = ["gone"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(FORMATS.builtins) - {"tokenized", "text"}))
@given(data=st.data())
def test_a_record_with_anything_in_it_is_a_conversation_or_a_bad_row(kind, data):
    record = WHOLE[kind]
    for _ in range(data.draw(st.integers(0, 3))):
        if found := list(places(record)):
            record = put(record, data.draw(st.sampled_from(found)), data.draw(ANY | st.just(GONE)))
    try:
        found = parse(record, type=kind)
    except BadRecord as fault:
        fault.why.encode()
        return
    sides = {
        PreferencePair: lambda: (found.chosen, found.rejected),
        RatedCompletion: lambda: (found.conversation,),
        Conversation: lambda: (found,),
    }[type(found)]()
    for side in sides:
        json.dumps([side.messages, side.tools], ensure_ascii=False, allow_nan=False).encode()
        for message, trained in zip(side.messages, side.trained, strict=True):
            assert message["role"] in ("system", "user", "assistant", "tool")
            assert isinstance(message["content"], str) or message["tool_calls"]
            assert message["role"] == "assistant" or not trained


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 500 + "1" + "}" * 500, "1" * 5000])
def test_json_as_text_may_be_as_deep_or_long_as_it_likes(text):
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": text}]}
    with pytest.raises(BadRecord):
        parse({"messages": [call]}, type="chat")
    with pytest.raises(BadRecord):
        parse({"messages": [said("user", "x")], "tools": text}, type="chat")


def test_columns_of_objects_alone_lose_their_padding(tmp_path, monkeypatch):
    said = [{"role": "user", "content": "1"}, {"role": "tool", "content": "2", "name": "f"}]
    table = {"ids": [[1, None]], "messages": [said], "meta": [{"a": None, "of": [{"b": None}]}]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    walked: list[Any] = []
    monkeypatch.setattr(
        "penstock.prepare.readers.columnar.drop_nulls",
        lambda value: walked.append(value) or drop_nulls(value),
    )
    [chunk] = parquet(SourceFile("a.parquet", tmp_path / "a.parquet"), None)
    [row] = chunk.part(0, None).values()
    assert row == {"ids": [1, None], "messages": said, "meta": {"of": [{}]}}
    assert table["meta"][0] in walked
    assert table["ids"][0] not in walked
