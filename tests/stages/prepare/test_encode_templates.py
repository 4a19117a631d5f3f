"""Conversations by published chat templates, judged by transformers and by TRL's training ones."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.prepare.bad_records import BadRecord
from penstock.prepare.chat_templates.compiled import compile_template
from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.encode.render_chat import Renderer
from penstock.prepare.readers.columnar import arrow_file
from penstock.prepare.readers.decompress import SourceFile
from penstock.prepare.settings import DatasetSettings
from penstock.rows.tokenizer import byte_tokenizer
from tests.stages.prepare.conversations import parse

SPEC = importlib.util.find_spec("trl")
assert SPEC
assert SPEC.origin
TEMPLATES = Path(SPEC.origin).parent / "chat_templates"
"""As they are published with models, and as TRL trains on them."""

PUBLISHED = sorted(
    file.stem for file in TEMPLATES.glob("*.jinja") if not file.stem.endswith("_training")
)

PLAIN = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "2, of course"},
    {"role": "user", "content": "three?"},
    {"role": "assistant", "content": "3"},
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
REASONED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
    {
        **{"role": "assistant", "content": "", "tool_calls": [CALL]},
        "reasoning_content": "I should add.",
    },
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "2", "reasoning_content": "It says 2."},
    {"role": "user", "content": "and 2 + 2?"},
    {"role": "assistant", "content": "4", "reasoning_content": "Known."},
    {"role": "user", "content": "3 + 3?"},
    {"role": "assistant", "content": "6"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": None, "strict": None}}]


def tokenizer_of(name: str) -> Any:
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    return tokenizer


def text_of(name: str, messages, tools: Any = None) -> Any:
    """By transformers."""
    return tokenizer_of(name).apply_chat_template(messages, tools=tools, tokenize=False)


def document(name: str, messages, tools=None, **its):
    settings = DatasetSettings(type="chat", **its)
    conversation = parse({"messages": messages, "tools": tools}, type="chat")
    return Renderer(tokenizer_of(name), settings).render(conversation)


@pytest.mark.parametrize(
    ("messages", "tools"), [(PLAIN, None), (REASONED, None), (REASONED, TOOLS)]
)
@pytest.mark.parametrize("mode", ["auto", "per_turn"])
def test_turns_that_qwen3_changes_are_trained_as_trls_template_has_them(messages, tools, mode):
    found = document("qwen3", messages, tools, turn_rendering=mode)
    tokenizer = tokenizer_of("qwen3_training")
    rendered: Any = render_jinja_template(
        [messages],
        tools=tools,
        chat_template=tokenizer.chat_template,
        return_assistant_tokens_mask=True,
    )
    [text], [spans] = rendered
    assert found.text == text
    # TRL trains the line break after the end of a turn too.
    ends = [(start, end - text[start:end].endswith("\n")) for start, end in spans]
    assert [(span.start, span.stop) for span in found.spans or ()] == ends
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert [span.message for span in found.spans or ()] == answers


def test_qwen3s_changed_turns_are_unusable_as_published():
    with pytest.raises(BadRecord, match="turn_rendering: per_turn"):
        document("qwen3", PLAIN, turn_rendering="whole")


@pytest.mark.slow
def test_both_ways_are_alike_wherever_a_published_template_keeps_its_prefix():
    alike, by_turn, refused = [], [], []
    for name in PUBLISHED:
        try:
            published = document(name, PLAIN, turn_rendering="whole")
        except BadRecord:
            by_turn.append(name)
            continue
        try:
            trained = document(name, PLAIN, turn_rendering="per_turn")
        except BadRecord:
            refused.append(name)
            continue
        assert (trained.text, trained.spans) == (published.text, published.spans), name
        # A template that asks for the date gets another one from transformers.
        if "strftime_now" not in tokenizer_of(name).chat_template:
            assert published.text == text_of(name, PLAIN), name
        alike.append(name)
    assert {"qwen2_5", "llama3_1", "gemma3", "glm4moe", "qwen3_instruct_2507"} <= set(alike)
    # They loop over parts of messages, and show text letter by letter.
    assert set(refused) <= {"idefics3", "smolvlm"}
    for name in {"qwen3", "qwen3_5_think", "qwen3_6"} & set(PUBLISHED):
        assert name in by_turn
        assert len(document(name, PLAIN).spans or ()) == 3


def test_tools_are_what_transformers_makes_of_the_same_json():
    tools = [
        {
            **{"type": "function", "strict": None},
            "function": {
                "name": "add",
                "description": None,
                "required": None,
                "parameters": {"type": "object", "properties": {"a": {"default": None}}},
            },
        }
    ]
    wanted = text_of("qwen3", PLAIN[:2], tools)
    for given in (tools, json.dumps(tools), [json.dumps(tools[0])]):
        assert document("qwen3", PLAIN[:2], given).text == wanted


def test_reasoning_is_read_under_the_name_that_a_template_has_for_it():
    for name in ("reasoning_content", "reasoning", "thinking"):
        said = [PLAIN[0], {**PLAIN[1], name: "Count."}]
        assert "<think>\nCount.\n</think>" in document("qwen3", said).text
        with pytest.raises(BadRecord, match="no place for reasoning"):
            document("qwen2_5", said)


def test_parts_of_messages_are_what_they_are_called():
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "value": "1 + "}, {"type": "text", "text": "1?"}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "reasoning", "value": "I should add."},
                {"type": "text", "value": "Adding."},
                {"type": "tool_call", "value": json.dumps(CALL["function"])},
            ],
        },
        {"role": "tool", "content": [{"type": "tool", "value": "2"}]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "Two."}, {"type": "text", "text": "2"}],
        },
    ]
    plain = [
        {"role": "user", "content": "1 + 1?"},
        {
            **{"role": "assistant", "content": "Adding.", "tool_calls": [CALL]},
            "reasoning_content": "I should add.",
        },
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2", "reasoning_content": "Two."},
    ]
    found = parse({"messages": parts}, type="chat")
    assert found == parse({"messages": plain}, type="chat")
    wanted = text_of("qwen3", plain)
    assert document("qwen3", parts).text == wanted


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "audio", "value": "x"}, "is audio, which no answer can hold"),
        ({"type": "file", "value": "x"}, "of type 'file'; only text"),
        ({"type": "text", "words": "x"}, "has no text and no value; it has type, words"),
        ({"type": "tool_call", "value": "no"}, "is not JSON"),
        ({"type": "tool", "value": "x"}, "a tool's answer in a message of assistant"),
    ],
)
def test_what_is_wrong_with_a_part_is_said(part, why):
    with pytest.raises(BadRecord, match=why):
        parse({"messages": [PLAIN[0], {"role": "assistant", "content": [part]}]}, type="chat")


def test_several_turns_of_qwen3_become_samples():
    settings = DatasetSettings(type="chat")
    encode = Encoder(settings, tokenizer_of("qwen3"))
    samples = encode([{"messages": PLAIN}, {"messages": PLAIN[:2]}])
    assert (samples.records, samples.faults) == ([0, 1], {})
    assert encode.num_per_turn == 1


def test_nulls_that_columns_are_filled_with_are_read_as_absent(tmp_path):
    tools = [{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {"b": [{"c": 2}]}}]
    batch = pa.RecordBatch.from_pylist([{"tools": tools, "alone": None}])
    path = tmp_path / "tools.arrow"
    with pa.ipc.new_file(path, batch.schema) as writer:
        writer.write_batch(batch)
    [chunk] = arrow_file(SourceFile("tools.arrow", path), None)
    assert batch.to_pylist()[0]["tools"] != tools
    assert chunk.values() == [{"tools": tools, "alone": None}]


def test_a_key_of_a_message_is_read_as_jinja_reads_it():
    template = "".join(
        f"{{{{ m.{name} is defined }}}} {{{{ m.{name} is callable }}}} "
        for name in ("role", "items", "keys", "absent", "__class__")
    )
    messages = [{"role": "user", "content": "a", "items": 3}]
    text = f"{{% for m in messages %}}{template}{{{{ m.role }}}}{{% endfor %}}"
    plain = ImmutableSandboxedEnvironment().from_string(text).render(messages=messages)
    assert compile_template(text).render(messages, {}) == plain
    assert "user" in plain
