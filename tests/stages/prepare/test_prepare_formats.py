"""Formats that hold text or tokens, and what data options make of them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from penstock.core.errors import StageError
from penstock.prepare.bad_records import BadRecord
from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.settings import DatasetSettings
from penstock.rows.tokenizer import byte_tokenizer
from tests.stages.prepare.encoding import encode, trained

TOKENIZER: Any = byte_tokenizer()
PLAIN: Any = byte_tokenizer()
PLAIN.chat_template = None
END = TOKENIZER.eos_token_id
CONTENT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
USER = {"role": "user", "content": "x"}
ANSWER = {"role": "assistant", "content": "y"}
QUESTION = {"q": "2 + 2?", "a": "4", "c": "in base ten", "s": "count"}
FIELDS = {
    "type": "instruction",
    "field_instruction": "q",
    "field_output": "a",
    "field_input": "c",
    "field_system": "s",
}


def test_an_instruction_is_a_chat_where_the_tokenizer_has_a_template():
    ids, labels = encode(QUESTION, TOKENIZER, **FIELDS)
    assert TOKENIZER.decode(ids) == (
        "<|im_start|>system\ncount<|im_end|>\n<|im_start|>user\n2 + 2?\n\nin base ten<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n"
    )
    assert trained(TOKENIZER, labels) == "4<|im_end|>"


@pytest.mark.parametrize(
    ("its", "end", "is_trained"),
    [
        ({}, "<|im_end|>", "4<|im_end|>"),
        ({"mask_eos_in_loss": True}, "<|im_end|>", "4"),
        ({"add_eos": False}, "", "4"),
        ({"train_on_prompt": True}, "<|im_end|>", "2 + 2?\n\nin base ten\n\n4<|im_end|>"),
    ],
)
def test_an_instruction_is_plain_text_where_it_has_none(its, end, is_trained):
    ids, labels = encode({**QUESTION, "s": None}, PLAIN, **FIELDS, **its)
    assert TOKENIZER.decode(ids) == "2 + 2?\n\nin base ten\n\n4" + end
    assert trained(TOKENIZER, labels) == is_trained


def test_without_a_template_several_turns_have_no_form():
    record = {"prompt": [USER, ANSWER, USER], "completion": "a", "label": True}
    fault = encode(record, PLAIN, type="kto")
    assert fault.reason == "template"
    assert "no chat template" in fault.why


@given(CONTENT.filter(str.strip))
def test_text_is_trained_whole_and_ends_with_the_end_token(text):
    ids, labels = encode({"text": text}, TOKENIZER, type="text")
    assert ids == [*text.encode(), END]
    assert labels == ids


def test_text_may_be_in_parts_and_its_end_be_left_out_or_untrained():
    record = {"text": ["a", "b ", "c"]}
    assert encode(record, TOKENIZER, type="text")[0] == [*b"ab c", END]
    assert encode(record, TOKENIZER, type="text", add_eos=False) == ([*b"ab c"], [*b"ab c"])
    masked = encode(record, TOKENIZER, type="text", mask_eos_in_loss=True)
    assert masked == ([*b"ab c", END], [*b"ab c", -100])


@pytest.mark.parametrize("its", [{}, {"add_eos": False}, {"mask_eos_in_loss": True}])
def test_a_text_that_ends_with_the_end_token_has_no_second_one(its):
    ids, labels = encode({"text": "ab<|im_end|>"}, TOKENIZER, type="text", **its)
    assert ids == [*b"ab", END]
    assert labels[-1] == (-100 if "mask_eos_in_loss" in its else END)


def test_a_tokenizers_own_start_and_end_are_around_a_text_once():
    framed: Any = byte_tokenizer()
    framed.chat_template = None
    framed.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>",
        special_tokens=[("<|endoftext|>", 256), ("<|im_end|>", END)],
    )
    assert encode({"text": "ab"}, framed, type="text")[0] == framed("ab")["input_ids"]
    ids, labels = encode({"instruction": "q", "output": "a"}, framed, type="instruction")
    assert ids == framed("q\n\na")["input_ids"]
    assert labels == [-100] * 4 + [*b"a", END]


def test_tokenized_is_taken_as_it_is():
    record = {"input_ids": [1, 2, 3], "labels": [-100, 2, 9], "more": 0}
    assert encode(record, TOKENIZER) == ([1, 2, 3], [-100, 2, 9])


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
        ({"input_ids": [2**70], "labels": [1]}, {}, "bad_value", "over 32 bits"),
        ({"input_ids": [1, 2], "labels": [1]}, {}, "bad_value", "2 entries and labels 1"),
        ({"input_ids": [], "labels": []}, {}, "empty", "no tokens"),
        ({"input_ids": [1], "labels": [1]}, {}, "no_trained_tokens", "none of its 1 tokens"),
        ({"text": 5}, {"type": "text"}, "wrong_type", "text is a number where a string"),
        ({"text": None}, {"type": "text"}, "wrong_type", "text is null"),
        ({"text": ["a", 5]}, {"type": "text"}, "wrong_type", r"text\[1\] is a number"),
        ({"text": " \n"}, {"type": "text"}, "empty", "text is empty"),
        ({"text": []}, {"type": "text"}, "empty", "text is empty"),
        ({"text": "\ud800"}, {"type": "text"}, "bad_value", "surrogate"),
        ({**QUESTION, "a": ""}, FIELDS, "empty", "a is empty"),
        ({**QUESTION, "c": 3}, FIELDS, "wrong_type", "c is a number"),
    ],
)
def test_what_is_wrong_with_a_record_is_said(record, its, reason, why):
    fault = encode(record, TOKENIZER, **its)
    assert fault.reason == reason
    with pytest.raises(BadRecord, match=why):
        raise fault


def test_a_tokenizer_without_a_template_cannot_chat():
    with pytest.raises(StageError, match="no chat template"):
        Encoder(DatasetSettings(type="chat"), PLAIN)


def test_a_tokenizer_without_an_end_token_serves_only_texts_that_are_not_ended():
    endless: Any = byte_tokenizer()
    endless.chat_template = endless.eos_token = None
    with pytest.raises(StageError, match="no end-of-sequence token"):
        Encoder(DatasetSettings(type="text"), endless)
    assert encode({"text": "a "}, endless, type="text", add_eos=False)[0] == [*b"a "]
