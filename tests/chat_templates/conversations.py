"""Conversations by which chat templates are compared, by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.prepare.encode.render_chat import DATE, STRFTIME_NOW

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Chat:
    """Messages with the tools and the variables that they are rendered with."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(name: str, arguments: Any, number: int = 1) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": f"call0000{number}", "function": function}


def result(text: str, number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": f"call0000{number}", "name": "weather"}


def tool(name: str, description: str, required: list[str], **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


WEATHER = tool(
    "weather",
    "Weather of a place — now",
    ["place"],
    place={"type": "string", "description": "Café or city"},
    unit={"type": "string", "enum": ["C", "F"], "default": "C"},
)
PLAN = tool(
    "plan",
    "Plans a day",
    [],
    stops={"type": "array", "items": {"type": "string"}},
    when={"type": "object", "properties": {"hour": {"type": "integer"}}},
    budget={"type": "number", "nullable": True},
    dry={"type": "boolean"},
    mode={"oneOf": [{"type": "string", "description": "s"}, {"type": "integer", "default": 1}]},
    legs={"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
)
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time",
        "parameters": {"type": "object", "properties": {}},
    },
}
OSLO, ROME = call("weather", {"place": "Oslo", "unit": "C"}), call("weather", {"place": "Rómá"}, 2)
CALLED = [user("Weather in Oslo?"), assistant(None, tool_calls=[OSLO]), result('{"t": 7}')]

CHATS: dict[str, Chat] = {
    "question": Chat([user("Hello?")]),
    "answer": Chat([user("Hello?"), assistant("Hi.")]),
    "system question": Chat([system("Be brief."), user("Hello?")]),
    "system answer": Chat([system("Be brief."), user("Hello?"), assistant("Hi.")]),
    "two turns": Chat([user("One?"), assistant("1."), user("Two?"), assistant("2.")]),
    "second question": Chat([user("One?"), assistant("1."), user("Two?")]),
    "system two turns": Chat(
        [system("Count."), user("One?"), assistant("1."), user("Two?"), assistant("2.")]
    ),
    "system second question": Chat([system("Count."), user("One?"), assistant("1."), user("Two?")]),
    "three turns": Chat(
        [turn for n in "abc" for turn in (user(f"Letter {n}?"), assistant(f"It is {n}."))]
    ),
    "empty system": Chat([system(""), user("Hello?")]),
    "blanks around": Chat([system("  Padded. \n"), user(" \n q  "), assistant("\n a \t\n")]),
    "blank lines": Chat([user("q\n\n\nq"), assistant("a\n\n\n  a"), user("\n"), assistant("a")]),
    "unicode": Chat([system("Ünïcode"), user("你好 世界 🌍"), assistant("שלום \u200d👩‍🚀 ñ")]),
    "markup": Chat([user("<b>&amp;'\"</b> {{ x }} {% if y %}"), assistant("\\n {# no #} </s>")]),
    "code": Chat([user("Code?"), assistant("```python\nfor i in x:\n    print(i)\n```\n")]),
    "line ends": Chat([user("a\r\nb\tc"), assistant("d\r\n\te")]),
    "json": Chat([user('{"a": [1, null]}'), assistant('{"b": "\\u00e9 \\n"}')]),
    "long words": Chat([user("word " * 60), assistant("x" * 300)]),
    "one letter": Chat([user("a"), assistant("b"), user("c")]),
    "braces": Chat([user("${HOME} %s {0} }}"), assistant("{%- raw -%} }} {{'")]),
    "role names": Chat([user("user\nassistant"), assistant("assistant: system\nmodel")]),
    "tags": Chat([user("<think> [INST] ### Response:"), assistant("</s> [/INST] <end>")]),
    "list": Chat([user("Three?"), assistant("1. a\n2. b\n\n- c\n"), user("More?")]),
    "four turns": Chat(
        [turn for n in range(4) for turn in (user(f"{n}?"), assistant(f" {n}! "))],
    ),
    "empty answer": Chat([user("Say nothing."), assistant("")]),
    "empty question": Chat([user(""), assistant("What?")]),
    "late system": Chat([user("One?"), assistant("1."), system("Shout."), user("Two?")]),
    "two systems": Chat([system("A."), system("B."), user("q"), assistant("a")]),
    "two users": Chat([user("One?"), user("Two?"), assistant("3.")]),
    "assistant first": Chat([assistant("Welcome."), user("q"), assistant("a")]),
    "reasoning": Chat([user("2+2?"), assistant("4", reasoning_content="two\nand two\n")]),
    "earlier reasoning": Chat(
        [
            *(user("2+2?"), assistant("4", reasoning_content="easy")),
            *(user("3+3?"), assistant("6", reasoning_content="hard")),
        ]
    ),
    "inline reasoning": Chat(
        [
            *(user("2+2?"), assistant("<think>\neasy\n</think>\n\n4")),
            *(user("3+3?"), assistant("<think>\nhard\n</think>\n\n6")),
        ]
    ),
    "no thinking": Chat(
        [user("2+2?"), assistant("4"), user("3+3?")], None, {"enable_thinking": False}
    ),
    "thinking": Chat([user("2+2?")], None, {"enable_thinking": True}),
    "date": Chat([user("Day?"), assistant("Friday.")], None, {"date_string": "1 Jan 2020"}),
    "tools unused": Chat([user("Hi"), assistant("Hello.")], [WEATHER]),
    "system and tools": Chat([system("Be brief."), user("Hi")], [WEATHER, PLAN, CLOCK]),
    "call": Chat(CALLED[:2], [WEATHER]),
    "result": Chat(CALLED, [WEATHER]),
    "result answer": Chat([*CALLED, assistant("7 °C.")], [WEATHER]),
    "call with words": Chat(
        [system("Help."), user("Oslo?"), assistant("Let me see.", tool_calls=[OSLO]), result("7")],
        [WEATHER],
    ),
    "two calls": Chat(
        [
            *(user("Oslo, Rome?"), assistant(None, tool_calls=[OSLO, ROME])),
            *(result("7"), result("21", 2), assistant("7 and 21.")),
        ],
        [WEATHER],
    ),
    "calls again": Chat(
        [
            *(*CALLED, assistant(None, tool_calls=[ROME]), result("21", 2), assistant("21.")),
            *(user("And now?"), assistant("Nothing.")),
        ],
        [WEATHER],
    ),
    "text arguments": Chat(
        [
            user("Oslo?"),
            assistant(None, tool_calls=[call("weather", '{"place": "Oslo"}')]),
            *(result("7"), assistant("7.")),
        ],
        [WEATHER],
    ),
    "reasoning and call": Chat(
        [
            user("Oslo?"),
            assistant(None, reasoning_content="Must look.", tool_calls=[OSLO]),
            *(result("7"), assistant("7.", reasoning_content="Seen.")),
        ],
        [WEATHER],
    ),
    "tools in system": Chat([user("Hi")], [PLAN], {"tools_in_user_message": False}),
    "reasoning in the system prompt": Chat([user("q"), assistant("a")], None, {"thinking": True}),
    "thinking as text": Chat([system("Be brief. /no_think"), user("q"), assistant("\n\na")]),
    "nothing but thinking": Chat([system("/think"), user("q")], None, {"enable_thinking": False}),
    "system only": Chat([system("Just this. /system_override"), user("q"), assistant("a")]),
    "tools as variables": Chat(
        [user("q"), assistant("a")], None, {"xml_tools": [CLOCK], "python_tools": [PLAN]}
    ),
    "tools as text": Chat(
        [{**system("Help."), "tools": '[{"name": "f"}]'}, user("q"), assistant("a")]
    ),
}


def fixed_date(template: str) -> str:
    """The template with the date that training data has, as in `prepare`."""
    return STRFTIME_NOW.sub(lambda match: repr(DATE.strftime(match[2])), template)


def without_nulls(messages: Messages) -> Messages:
    """As `prepare` gives messages to a template."""
    return [{k: v for k, v in message.items() if v is not None} for message in messages]
