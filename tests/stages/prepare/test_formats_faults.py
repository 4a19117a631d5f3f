"""What is said of conversations that mean nothing: where, what and why."""

import pytest

from penstock.prepare.bad_records import BadRecord
from tests.stages.prepare.conversations import parse

ASKED = {"role": "user", "content": "1 + 1?"}
CALL = {"name": "add", "arguments": {}}


def saying(**message):
    return {"messages": [ASKED, {"role": "assistant", **message}]}


def calling(*calls):
    return saying(tool_calls=list(calls))


CHAT = {"type": "chat"}
SHARE = {"type": "sharegpt"}
ALPACA = {"type": "alpaca"}


@pytest.mark.parametrize(
    ("record", "its", "reason", "why"),
    [
        ({"message": []}, CHAT, "missing_column", "no column 'messages'.*did you mean 'message'"),
        ({"messages": 1}, CHAT, "wrong_type", "messages is a number where a list of messages"),
        ({"messages": "hi"}, CHAT, "wrong_type", "messages is text where a list of messages is"),
        ({"messages": "{}"}, CHAT, "wrong_type", "messages is an object where a list of messages"),
        ({"messages": " "}, CHAT, "empty", "messages is empty"),
        ({"conversations": "[{]"}, SHARE, "bad_value", "conversations is not JSON: .* character 3"),
        (
            {**saying(content="2"), "label": [1, 1]},
            CHAT,
            "bad_value",
            "label is a list of 2 where a list of 1 is meant, one for each message of the assist",
        ),
        ({**saying(content="2"), "label": [2]}, CHAT, "bad_value", r"label\[0\] is 2 where 0 or 1"),
        ({**saying(content="2"), "label": "[1"}, CHAT, "bad_value", "label is not JSON"),
        ({"messages": []}, CHAT, "empty", "messages is empty"),
        ({"messages": ["hi"]}, CHAT, "wrong_type", r"messages\[0\] is a string where an object"),
        ({"messages": [{"from": "x"}]}, CHAT, "missing_column", r"\[0\] has no role; it has from"),
        (saying(), CHAT, "missing_column", r"messages\[1\] has no content; it has role"),
        (saying(content=None), CHAT, "wrong_type", r"messages\[1\].content is null where a string"),
        (saying(content=3), CHAT, "wrong_type", r"messages\[1\].content is a number"),
        (saying(content="\ud800"), CHAT, "bad_value", r"messages\[1\].content is not text"),
        (
            {"messages": [{**ASKED, "role": "asistant"}]},
            CHAT,
            "bad_value",
            r"messages\[0\].role is 'asistant'; did you mean 'assistant'",
        ),
        ({"messages": [{**ASKED, "role": "x"}]}, CHAT, "bad_value", "known are system, developer"),
        (
            saying(content=[{"type": "text", "text": "a"}, {"type": "image_url"}]),
            CHAT,
            "bad_value",
            r"messages\[1\].content\[1\] is an image, which no answer can hold",
        ),
        (saying(content=["a"]), CHAT, "wrong_type", r"messages\[1\].content\[0\] is a string"),
        (saying(content="", images=["a.png"]), CHAT, "bad_value", r"messages\[1\] has images"),
        (saying(content="", weight=-0.5), CHAT, "bad_value", r"\[1\].weight is -0.5; a loss"),
        (saying(content="", note=float("nan")), CHAT, "bad_value", r"messages\[1\].note is nan"),
        (saying(content="", note=b""), CHAT, "wrong_type", r"messages\[1\].note is bytes"),
        (
            saying(content="", reasoning_content=[]),
            CHAT,
            "wrong_type",
            "reasoning_content is a list",
        ),
        (
            calling(CALL, {"name": "f", "arguments": "{x}"}),
            CHAT,
            "bad_value",
            r"messages\[1\].tool_calls\[1\].arguments is not JSON: Expecting .* at character 2",
        ),
        (
            calling({"type": "function", "function": {"name": "f", "arguments": "[1]"}}),
            CHAT,
            "wrong_type",
            r"messages\[1\].tool_calls\[0\].function.arguments is a list where an object",
        ),
        (
            calling({"function": {}}),
            CHAT,
            "missing_column",
            r"tool_calls\[0\].function has no name",
        ),
        (calling({"type": "custom", "function": CALL}), CHAT, "bad_value", "type is 'custom'"),
        (saying(tool_calls={"a": 1}), CHAT, "wrong_type", "tool_calls is an object where a list"),
        (saying(tool_calls=[CALL], function_call=CALL), CHAT, "bad_value", "has both"),
        ({"messages": [{**ASKED, "tool_calls": [CALL]}]}, CHAT, "bad_value", "only the assistant"),
        ({"messages": [ASKED], "tools": "[{}]"}, CHAT, "missing_column", r"tools\[0\] has no name"),
        ({"messages": [ASKED], "tools": "no"}, CHAT, "bad_value", "tools is not JSON"),
        ({"messages": [ASKED], "tools": {"a": 1}}, CHAT, "missing_column", "tools has no name"),
        ({"messages": [ASKED], "tools": 1}, CHAT, "wrong_type", "tools is a number where a list"),
        ({"messages": [ASKED], "tools": "[{'name': 'f'}]"}, CHAT, "bad_value", "with json.dumps"),
        (
            {"messages": [ASKED], "tools": {"functions": [], "x": 1}},
            CHAT,
            "bad_value",
            "tools has functions beside x",
        ),
        (
            {"messages": [ASKED], "tools": [{"name": "f", "parameters": {}, "inputSchema": {}}]},
            CHAT,
            "bad_value",
            "has both parameters and inputSchema",
        ),
        ({"messages": [ASKED]}, {**CHAT, "field_system": "s"}, "missing_column", "no column 's'"),
        ({"conversations": [{"from": "gpt"}]}, SHARE, "missing_column", r"\[0\] has no value"),
        (
            {"conversations": [{"from": "function_call", "value": "call"}]},
            SHARE,
            "bad_value",
            r"conversations\[0\].value is not JSON",
        ),
        (
            {"conversations": [{"from": "function_call", "value": '[{"name": 1}]'}]},
            SHARE,
            "wrong_type",
            r"conversations\[0\].value\[0\].name is a number",
        ),
        ({"conversations": [{"from": "hunan", "value": ""}]}, SHARE, "bad_value", "mean 'human'"),
        ({"messages": []}, SHARE, "missing_column", "no column 'conversations'; it has messages"),
        ({"instruction": " ", "output": "x"}, ALPACA, "empty", "instruction is empty"),
        ({"instruction": "x", "output": " "}, ALPACA, "empty", "output is empty"),
        (
            {"instruction": "x", "output": "y", "input": 1},
            ALPACA,
            "wrong_type",
            "input is a number",
        ),
        (
            {"instruction": "x", "output": "y", "history": [["q"]]},
            ALPACA,
            "wrong_type",
            r"history\[0\] is not a list of a question and an answer",
        ),
        (
            {"instruction": "x", "output": "y", "history": [["q", None]]},
            ALPACA,
            "wrong_type",
            r"history\[0\]\[1\] is null",
        ),
    ],
)
def test_what_is_wrong_with_a_conversation_is_said(record, its, reason, why):
    with pytest.raises(BadRecord, match=why) as raised:
        parse(record, **its)
    assert raised.value.reason == reason
