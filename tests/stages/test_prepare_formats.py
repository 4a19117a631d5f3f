import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import StageError
from penstock.prepare.faults import BadRow
from penstock.prepare.formats.registry import encoder
from penstock.prepare.settings import DatasetSettings
from penstock.rows.tokenizer import byte_tokenizer

TOKENIZER: Any = byte_tokenizer()
CONTENT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
CHATS = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), CONTENT), min_size=1, max_size=6
).map(lambda turns: [{"role": role, "content": content} for role, content in turns])


def tokenizer_with(template: str | None) -> Any:
    """The byte-level tokenizer under another chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


UNMARKED = tokenizer_with(
    TOKENIZER.chat_template.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
)
PLAIN = tokenizer_with(None)


def encode(record: Any, tokenizer: Any = TOKENIZER, **settings: Any) -> Any:
    [sample] = encoder(DatasetSettings(**settings), tokenizer)([record])
    return sample


def trained(sample):
    return TOKENIZER.decode([label for label in sample.labels.tolist() if label != -100])


@given(CHATS)
def test_chat_trains_what_transformers_marks_as_the_assistants(messages):
    sample = encode({"messages": messages}, type="chat")
    judge = TOKENIZER.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    assert sample.input_ids.tolist() == judge["input_ids"]
    assert (sample.labels != -100).astype(int).tolist() == judge["assistant_masks"]


@given(CHATS.filter(lambda messages: messages[0]["role"] != "assistant"))
def test_without_marks_the_turns_are_found_by_their_beginnings(messages):
    marked = encode({"messages": messages}, type="chat")
    found = encode({"messages": messages}, UNMARKED, type="chat")
    assert found.input_ids.tolist() == marked.input_ids.tolist()
    assert found.labels.tolist() == marked.labels.tolist()


def test_without_marks_a_conversation_that_the_assistant_begins_is_a_bad_row():
    fault = encode({"messages": [{"role": "assistant", "content": "a"}]}, UNMARKED, type="chat")
    assert "begins with the assistant" in fault.why


def test_a_template_that_rewrites_earlier_turns_gives_a_bad_row_not_a_wrong_mask():
    forgetful = tokenizer_with(
        "{% for m in messages %}{{ m['role'] + ':' }}"
        "{{ m['content'] if loop.last or m['role'] == 'user' else '...' }}{% endfor %}"
    )
    chat = [{"role": r, "content": "x"} for r in ("user", "assistant", "user", "assistant")]
    assert encode({"messages": chat[:2]}, forgetful, type="chat").is_trained
    fault = encode({"messages": chat}, forgetful, type="chat")
    assert fault.reason == "template"
    assert "message 2 reads differently" in fault.why


def test_a_conversation_that_the_template_refuses_spoils_only_itself():
    strict = tokenizer_with(
        "{%- if messages[0]['role'] != 'user' -%}{{ raise_exception('start with user') }}"
        "{%- endif -%}" + TOKENIZER.chat_template
    )
    chats = [
        {"messages": [{"role": role, "content": "a"}, {"role": "assistant", "content": "b"}]}
        for role in ("user", "assistant", "user")
    ]
    samples: Any = encoder(DatasetSettings(type="chat"), strict)(chats)
    first, second, third = samples
    assert "start with user" in second.why
    assert trained(first) == trained(third) == "b<|im_end|>"


def test_a_system_prompt_of_its_own_column_comes_first_unless_there_is_one():
    record = {"messages": [{"role": "user", "content": "u"}], "s": "be brief"}
    its = {"type": "chat", "field_system": "s"}
    expected = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
    assert TOKENIZER.decode(encode(record, TOKENIZER, **its).input_ids.tolist()) == expected
    record["messages"].insert(0, {"role": "system", "content": "be long"})
    assert "brief" not in TOKENIZER.decode(encode(record, TOKENIZER, **its).input_ids.tolist())


QUESTION = {"q": "2 + 2?", "a": "4", "c": "in base ten", "s": "count"}
FIELDS = {
    "type": "instruction",
    "field_instruction": "q",
    "field_output": "a",
    "field_input": "c",
    "field_system": "s",
}


def test_an_instruction_is_a_chat_where_the_tokenizer_has_a_template():
    sample = encode(QUESTION, TOKENIZER, **FIELDS)
    assert TOKENIZER.decode(sample.input_ids.tolist()) == (
        "<|im_start|>system\ncount<|im_end|>\n<|im_start|>user\n2 + 2?\n\nin base ten<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n"
    )
    assert trained(sample) == "4<|im_end|>"


def test_an_instruction_is_plain_text_where_it_has_none():
    sample = encode({**QUESTION, "s": None}, PLAIN, **FIELDS)
    assert TOKENIZER.decode(sample.input_ids.tolist()) == "2 + 2?\n\nin base ten\n\n4<|im_end|>"
    assert trained(sample) == "4<|im_end|>"


@given(CONTENT.filter(str.strip))
def test_text_is_trained_whole_and_ends_with_the_end_token(text):
    sample = encode({"text": text}, type="text")
    assert sample.input_ids.tolist() == [*text.encode(), TOKENIZER.eos_token_id]
    assert sample.labels.tolist() == sample.input_ids.tolist()


def test_tokenized_is_taken_as_it_is():
    sample = encode({"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "more": 0})
    assert sample.input_ids.tolist() == [1, 2, 3]
    assert sample.labels.tolist() == [-100, 2, 3]


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("record", "its", "reason", "why"),
    [
        ({"input_ids": [1]}, {}, "missing_column", "no column 'labels'; it has input_ids"),
        ({"input_ids": [1], "label": [1]}, {}, "missing_column", "did you mean 'label'"),
        ({"input_ids": "1", "labels": [1]}, {}, "wrong_type", "a string where a list"),
        ({"input_ids": [1.5], "labels": [1]}, {}, "wrong_type", r"input_ids\[0\] is a number"),
        ({"input_ids": [True], "labels": [1]}, {}, "wrong_type", "a boolean"),
        ({"input_ids": [259], "labels": [1]}, {}, "bad_value", "holds 259; .* 0 to 258"),
        ({"input_ids": [1], "labels": [-1]}, {}, "bad_value", "labels holds -1"),
        ({"input_ids": [2**70], "labels": [1]}, {}, "bad_value", "over 64 bits"),
        ({"input_ids": [1, 2], "labels": [1]}, {}, "bad_value", "2 entries and labels 1"),
        ({"text": 5}, {"type": "text"}, "wrong_type", "text is a number where a string"),
        ({"text": None}, {"type": "text"}, "wrong_type", "text is null"),
        ({"text": " \n"}, {"type": "text"}, "empty", "text is empty"),
        ({"text": "\ud800"}, {"type": "text"}, "bad_value", "surrogate"),
        ({"messages": "hi"}, {"type": "chat"}, "wrong_type", "a string where a list"),
        ({"messages": []}, {"type": "chat"}, "empty", "messages is empty"),
        ({"messages": ["hi"]}, {"type": "chat"}, "wrong_type", r"messages\[0\] is a string"),
        ({"messages": [{"from": "x"}]}, {"type": "chat"}, "missing_column", "no role; it has from"),
        ({"messages": [{**USER, "content": [1]}]}, {"type": "chat"}, "wrong_type", "is a list"),
        ({"messages": [{**USER, "role": "tool"}]}, {"type": "chat"}, "bad_value", "of a tool"),
        (
            {"messages": [{**USER, "tool_calls": [1]}]},
            {"type": "chat"},
            "bad_value",
            "not available",
        ),
        ({**QUESTION, "a": ""}, FIELDS, "empty", "a is empty"),
        ({**QUESTION, "c": 3}, FIELDS, "wrong_type", "c is a number"),
    ],
)
def test_what_is_wrong_with_a_record_is_said(record, its, reason, why):
    fault = encode(record, TOKENIZER, **its)
    assert fault.reason == reason
    with pytest.raises(BadRow, match=why):
        raise fault


def test_a_tokenizer_without_a_template_cannot_chat():
    with pytest.raises(StageError, match="no chat template"):
        encoder(DatasetSettings(type="chat"), PLAIN)


def test_real_chats_of_another_dialect_are_refused_by_their_columns(shared):
    records = json.loads((shared / "data" / "chat" / "toolcall_en_demo.json").read_text())
    fault = encode(records[0], type="chat", field_messages="conversations")
    assert fault.reason == "missing_column"
    assert "it has from, value" in fault.why
