"""What a record holds is part of its prompt, or is reported with its count."""

from itertools import product

import pytest

from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.first_records import first_samples
from penstock.prepare.notices import data_warnings
from penstock.prepare.settings import DatasetSettings
from penstock.prepare.unread_columns import count_unread, excerpt
from penstock.rows.tokenizer import byte_tokenizer
from tests.stages.prepare.conversations import ASKED, BAD, GOOD, parse, said, told
from tests.stages.prepared import prepare, run, write_lines

HH = "\n\nHuman: 2 + 2?\n\nAssistant: "
ANSWERS = {"chosen": "4", "rejected": "5"}
WHOLE = {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]}
RATED = {"completion": "4", "label": True}
LAYOUTS = {
    "text": ({"prompt": "2 + 2?", **ANSWERS}, {}),
    "text, whole": ({"prompt": "2 + 2?", **WHOLE}, {}),
    "named": ({"question": "2 + 2?", **ANSWERS}, {"field_prompt": "question"}),
    "instruction": ({"instruction": "2 + 2?", **ANSWERS}, {}),
    "messages": ({"prompt": ASKED, **ANSWERS}, {}),
    "conversations": ({"conversations": told(ASKED), **ANSWERS}, {}),
    "ends with chosen": ({"messages": [*ASKED, GOOD], "rejected_response": "5"}, {}),
    "whole": (WHOLE, {}),
    "dialogue": ({"chosen": HH + "4", "rejected": HH + "5"}, {}),
    "kto text": ({"prompt": "2 + 2?", **RATED}, {}),
    "kto messages": ({"prompt": ASKED, **RATED}, {}),
    "kto whole": ({"messages": [*ASKED, GOOD], "label": True}, {}),
}
COLUMNS = {
    "system": "MARK",
    "system_prompt": "MARK",
    "input": "MARK",
    "context": "MARK",
    "history": [["MARK", "yes"]],
}
READ = {"system": LAYOUTS, "input": ("text", "named", "instruction", "kto text")}
READ["history"] = READ["input"]


REFUSED = {("text, whole", name) for name in ("input", "history")}
"""The prompt with the column is not that of the conversations."""


@pytest.mark.parametrize(
    ("layout", "column"), [case for case in product(LAYOUTS, COLUMNS) if case not in REFUSED]
)
def test_a_column_of_a_prompt_is_in_it_or_is_reported(layout, column):
    record, its = LAYOUTS[layout]
    kind = "kto" if layout.startswith("kto") else "preference"
    record = {**record, column: COLUMNS[column]}
    settings = DatasetSettings(type=kind, **its)
    pair = parse(record, type=kind, **its)
    sides = [pair.conversation] if kind == "kto" else [pair.chosen, pair.rejected]
    shown = {any("MARK" in message["content"] for message in side.messages) for side in sides}
    assert shown == {layout in READ.get(column, ())}
    unread = count_unread([record], settings, None)
    assert unread.counts == ({} if True in shown else {column: 1})
    for side in sides:
        assert side.messages[-1]["role"] == "assistant"
        assert side.trained == (False,) * (len(side.messages) - 1) + (True,)


def test_the_columns_of_a_text_prompt_have_alpacas_order():
    record = {"prompt": "2 + 2?", "input": "ten", "system": "s", "history": '[["a", "b"]]'}
    found = parse({**record, **RATED}, type="kto")
    assert found.conversation.messages == [
        *(said("system", "s"), said("user", "a"), said("assistant", "b")),
        *(said("user", "2 + 2?\n\nten"), GOOD),
    ]


TEMPLATE = """{% for m in messages %}
{{ m.role + m.content + (m.mood or '') + (m['tone'] or '') }}
{% endfor %}"""
CHAT = {"messages": [*ASKED, GOOD]}


def encoder(template=TEMPLATE, **its):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return Encoder(DatasetSettings(**{"type": "chat", **its}), tokenizer)


@pytest.mark.parametrize(
    ("more", "its", "unread"),
    [
        ({"mood": "good", "tone": "low"}, {}, ()),
        ({"timestamp": 3, "moo": "x"}, {}, ("timestamp", "moo")),
        ({"timestamp": None, "refusal": "", "annotations": [], "extra": {}}, {}, ()),
        ({"tool_call_id": "1", "weight": 1, "train": True}, {}, ()),
        ({"train": True, "loss": True}, {"field_message_training": "loss"}, ("train",)),
        ({"name": "Ann"}, {}, ("name",)),
    ],
)
def test_keys_of_messages_that_nothing_reads_are_counted(more, its, unread):
    plain = {"messages": [*ASKED, GOOD]}
    record = {"messages": [*ASKED, {**GOOD, **more}]}
    pair = {"prompt": ASKED, "chosen": {**GOOD, **more}, "rejected": "5"}
    for kind, records in (("chat", [record, plain, record]), ("preference", [pair, pair])):
        found = encoder(type=kind, **its)(records)
        assert not found.faults
        names = [f"messages[].{name}" for name in unread]
        assert found.unread_keys.counts == dict.fromkeys(names, 2)


def test_unread_keys_and_columns_are_told_by_prepare_and_for_the_first_records(tmp_path):
    turns = [{**turn, "timestamp": 5} for turn in CHAT["messages"]]
    records = [{"messages": turns}] * 3 + [{**CHAT, "system": "brief"}]
    path = write_lines(tmp_path / "a.jsonl", records)
    _, facts = run(prepare((path, {"type": "chat"})), tmp_path / "out")
    lines = list(data_warnings(facts))
    first = first_samples(records, DatasetSettings(type="chat"), byte_tokenizer())
    for told_by, file in ((lines, True), (first.unread, False)):
        of_column, of_key = sorted(told_by, key=lambda line: "messages[]" in line)
        assert "1 of 4 records have 'system', which type: chat does not read; write" in of_column
        assert (
            "3 of 4 records have 'messages[].timestamp', which neither Penstock nor the chat "
            "template reads; for example " + ("a.jsonl:1: 5" if file else "record 1: 5")
        ) in of_key
        assert of_column.endswith("a.jsonl:4: 'brief'" if file else "record 4: 'brief'")


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("note", "short\n and  sweet", "'short and sweet'"),
        ("note", "word " * 40, "'word word word word word word word wor…"),
        ("note", "is hf_aBcDeFgHiJkLmNoPqRsTuV ok", "'is hf_a… ok'"),
        ("link", "https://me:password@host.example/path", "'http…'"),
        ("api_key", "abc", "not shown"),
        ("messages[].token", "abc", "not shown"),
        ("extra", {"token": "abc", "b": 1}, "an object with token b"),
        ("extra", ["abc"] * 3, "a list of 3"),
        ("score", 0.25, "0.25"),
        ("note", "\ud800 half", "'\\\\ud800 half'"),
    ],
)
def test_an_example_is_short_and_shows_no_secret(name, value, shown):
    assert excerpt(name, value) == shown
