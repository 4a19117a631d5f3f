"""Conversations as they are found, and what they mean."""

import json
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.prepare.formats.conversation import Conversation
from penstock.prepare.settings import DatasetSettings
from penstock.prepare.unread_columns import count_unread
from tests.stages.prepare.conversations import parse

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | WORDS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2)
)
CALLS = st.builds(
    lambda name, arguments: {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    },
    WORDS,
    st.dictionaries(WORDS, VALUES, max_size=2),
)
MESSAGES = st.one_of(
    st.builds(
        lambda role, said: {"role": role, "content": said},
        st.sampled_from(["system", "user", "tool", "assistant"]),
        WORDS,
    ),
    st.builds(
        lambda said, calls: {"role": "assistant", "content": said, "tool_calls": calls},
        st.none() | WORDS,
        st.lists(CALLS, min_size=1, max_size=2),
    ),
)
TURNS = st.lists(st.tuples(MESSAGES, st.booleans()), min_size=1, max_size=5)
NAMES = {"user": "human", "assistant": "gpt", "system": "system", "tool": "observation"}


def follows_itself(turns) -> bool:
    """Whether there are bare calls after words of the assistant's, which sharegpt cannot tell
    from calls in the same message."""
    return any(
        this["content"] is None and last["role"] == "assistant" and weight == before
        for (last, before), (this, weight) in pairwise(turns)
    )


def as_sharegpt(message, weight):
    """One message as turns of `from` and `value`."""
    turns: list[dict[str, Any]] = []
    if message["content"] is not None:
        turns.append({"from": NAMES[message["role"]], "value": message["content"]})
    calls = [call["function"] for call in message.get("tool_calls", ())]
    if len(calls) == 1:
        turns.append({"from": "function_call", "value": json.dumps(calls[0])})
    elif calls:
        turns.append({"from": "function_call", "value": json.dumps(calls)})
    return [{**turn, "weight": int(weight)} for turn in turns]


@given(TURNS)
def test_messages_that_are_what_templates_take_are_taken_as_they_are(turns):
    messages = [{**message, "weight": float(weight)} for message, weight in turns]
    assert parse({"messages": messages}, type="chat") == Conversation(
        [message for message, _ in turns],
        None,
        tuple(message["role"] == "assistant" and weight for message, weight in turns),
    )


@given(TURNS.filter(lambda turns: not follows_itself(turns)))
def test_a_conversation_is_the_same_in_both_spellings(turns):
    told = [turn for message, weight in turns for turn in as_sharegpt(message, weight)]
    asked = [{**message, "weight": int(weight)} for message, weight in turns]
    assert parse({"conversations": told}, type="sharegpt") == parse(
        {"messages": asked}, type="chat"
    )


@given(TURNS, st.data())
def test_an_answer_is_trained_if_its_label_and_its_weight_are_1(turns, data):
    messages = [{**message, "weight": int(weight)} for message, weight in turns]
    plain = parse({"messages": messages}, type="chat")
    for unread in (None, "news", 0, True, 0.5, {"a": [0]}):
        assert parse({"messages": messages, "label": unread}, type="chat") == plain
    is_answer = [message["role"] == "assistant" for message in messages]
    count = sum(is_answer)
    labels = data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    found = parse({"messages": messages, "label": labels}, type="chat")
    assert found.messages == plain.messages
    trained = [t for t, answer in zip(found.trained, is_answer, strict=True) if answer]
    before = [t for t, answer in zip(plain.trained, is_answer, strict=True) if answer]
    assert trained == [a and b == 1 for a, b in zip(before, labels, strict=True)]


ASKED = {"role": "user", "content": "1 + 1?"}
CALL = {"name": "add", "arguments": {"a": [1, None]}}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": CALL}],
}


def spoken(*messages, **its):
    return parse({"messages": [ASKED, *messages]}, type="chat", **its).messages[1:]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": [{"function": CALL}]},
        {"role": "assistant", "tool_calls": [CALL], "content": None, "function_call": None},
        {"role": "assistant", "tool_calls": json.dumps([{"type": "function", "function": CALL}])},
        {"role": "assistant", "function_call": {**CALL, "arguments": '{"a": [1, null]}'}},
        {
            "role": "assistant",
            "weight": None,
            "tool_calls": [
                {
                    "id": None,
                    "type": "function",
                    "function": {**CALL, "arguments": '{"a":[1,null]}'},
                }
            ],
        },
    ],
)
def test_calls_mean_the_same_however_they_are_written(message):
    assert spoken(message) == [CALLED]


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_a_call_without_arguments_has_none(arguments):
    [message] = spoken({"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]})
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("4", "4"),
        ([{"stock": "$150"}], '[{"stock":"$150"}]'),
        ({"größe": [1, 2.5, None]}, '{"größe":[1,2.5,null]}'),
        ([], "[]"),
        (7, "7"),
        (False, "false"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "text"}], '[{"type":"text"}]'),
    ],
)
def test_a_tools_result_is_text_or_becomes_json(content, text):
    result = {"role": "tool", "content": content, "tool_call_id": "c1", "name": "add"}
    [_, said] = spoken(CALLED, result)
    assert said == {**result, "content": text}


def test_what_templates_may_read_is_kept_and_what_is_null_is_not():
    message = {
        "role": "assistant",
        "content": [{"type": "text", "text": "so "}, {"type": "text", "text": "2"}],
        "reasoning_content": "one and one",
        "prefix": True,
        "refusal": None,
        "images": [],
        "weight": 1,
    }
    assert spoken(message) == [
        {
            "role": "assistant",
            "content": "so 2",
            "reasoning_content": "one and one",
            "prefix": True,
        }
    ]


def test_messages_are_the_same_out_of_files_of_columns():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": null}'}}
    records = [
        {
            "messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}],
            "tools": json.dumps([FUNCTION]),
        },
        {"messages": [{**ASKED, "name": "me"}, {"role": "assistant", "content": "2", "weight": 0}]},
    ]
    filled = pa.Table.from_pylist(records).to_pylist()
    assert filled != records  # nulls are filled in
    for record, columns in zip(records, filled, strict=True):
        assert parse(columns, type="chat") == parse(record, type="chat")


def test_older_and_newer_names_of_speakers_are_those_that_templates_know():
    roles = ["developer", "user", "assistant", "function", "ipython", "tool"]
    messages = [{"role": role, "content": "x"} for role in roles]
    found = [message["role"] for message in parse({"messages": messages}, type="chat").messages]
    assert found == ["system", "user", "assistant", "tool", "tool", "tool"]


FUNCTION = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.mark.parametrize(
    "tools",
    [
        [TOOL],
        [FUNCTION],
        json.dumps([FUNCTION]),
        [json.dumps(TOOL)],
        [{**FUNCTION, "parameters": '{"type": "object"}'}],
        [{"type": None, "function": FUNCTION}],
        *(TOOL, FUNCTION, json.dumps(FUNCTION)),
        *({"functions": [FUNCTION]}, {"tools": [TOOL]}, json.dumps({"functions": [FUNCTION]})),
        [{"function_declarations": [FUNCTION]}],
        [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}],
        [{"name": "add", "description": "adds", "inputSchema": '{"type": "object"}'}],
    ],
    ids=str,
)
def test_tools_mean_the_same_however_they_are_written(tools):
    for record in ({"tools": tools}, {"functions": tools}, {"functions": tools, "tools": None}):
        assert parse({"messages": [ASKED], **record}, type="chat").tools == [TOOL]
        read = count_unread([record], DatasetSettings(type="chat"), None)
        assert read.counts == {}
    both = {"functions": tools, "tools": [{"name": "f"}]}
    assert count_unread([both], DatasetSettings(type="chat"), None).counts == {"functions": 1}


@pytest.mark.parametrize("tools", [None, "", "[]", []])
def test_no_tools_are_none(tools):
    assert parse({"messages": [ASKED], "tools": tools}, type="chat").tools is None


def test_in_sharegpt_calls_join_the_words_before_them_and_each_other():
    told = [
        {"from": "Human", "value": "weather and time?"},
        {"from": "gpt", "value": "I will look."},
        {"from": "function_call", "value": '{"name": "w", "arguments": {}}'},
        {"from": "function-call", "value": {"name": "t", "arguments": "{}"}},
        {"from": "observation", "value": {"rain": 0.5}},
        {"from": "observation", "value": "noon"},
        {"role": "assistant", "content": "Dry, noon.", "weight": 0},
    ]
    found = parse({"conversations": told}, type="sharegpt")
    w, t = ({"type": "function", "function": {"name": n, "arguments": {}}} for n in "wt")
    assert found.messages == [
        {"role": "user", "content": "weather and time?"},
        {"role": "assistant", "content": "I will look.", "tool_calls": [w, t]},
        {"role": "tool", "content": '{"rain":0.5}'},
        {"role": "tool", "content": "noon"},
        {"role": "assistant", "content": "Dry, noon."},
    ]
    assert found.trained == (False, True, False, False, False)


@pytest.mark.parametrize(
    ("its", "name", "system"),
    [
        ({"type": "sharegpt"}, "conversations", "system"),
        ({"type": "sharegpt", "field_system": "s"}, "conversations", "s"),
        ({"type": "chat", "field_system": "s"}, "messages", "s"),
    ],
)
def test_a_system_prompt_of_its_own_column_comes_first_unless_there_is_one(its, name, system):
    turns = [ASKED]
    found = parse({name: turns, system: "be brief"}, **its).messages
    assert found == [{"role": "system", "content": "be brief"}, ASKED]
    turns.insert(0, {"role": "system", "content": "be long"})
    assert parse({name: turns, system: "be brief"}, **its).messages == turns


def test_alpaca_has_an_input_a_system_prompt_and_earlier_turns_where_a_record_does():
    record = {"instruction": "Add.", "input": "1, 2", "output": "3", "system": "count"}
    record |= {"history": [["Hello?", "Hello!"]]}
    found = parse(record, type="alpaca")
    said = ["count", "Hello?", "Hello!", "Add.\n\n1, 2", "3"]
    assert [message["content"] for message in found.messages] == said
    assert found.trained == (False, False, True, False, True)
    bare = {"instruction": "Add.", "input": "", "output": "3", "system": None, "history": None}
    assert [m["content"] for m in parse(bare, type="alpaca").messages] == ["Add.", "3"]


def test_every_real_tool_call_is_what_its_record_says(shared):
    records = json.loads((shared / "data" / "chat" / "toolcall_en_demo.json").read_text())
    assert len(records) == 300
    for record in records:
        found = parse(record, type="sharegpt")
        assert [tool["function"] for tool in found.tools or []] == json.loads(record["tools"])
        for told, message in zip(record["conversations"], found.messages, strict=True):
            if told["from"] == "function_call":
                [call] = message["tool_calls"]
                assert call["function"] == json.loads(told["value"])
            else:
                assert NAMES[message["role"]] == told["from"]
                assert message["content"] == told["value"]


def test_real_calls_with_results_that_are_lists_are_read(shared):
    path = shared / "examples" / "erniekit_data" / "function-call-eval.record-3-trimmed.jsonl"
    found = parse(json.loads(path.read_text()), type="chat")
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {"company": "Apple"}
    assert found.messages[2]["content"] == '[{"stock_price":"$150.75"}]'
    assert len(found.tools) == 2
