"""Ranges of characters of a message that are trained (`field_message_training_detail`): what a row
may say. Which tokens they are is in `test_drawn_templates`."""

import json
from typing import Any

import pytest

from penstock.prepare.bad_records import BadRecord
from penstock.prepare.encode.render_chat import Renderer
from penstock.prepare.settings import DatasetSettings
from tests.config.values import faults_of
from tests.conftest import ROOT
from tests.stages.prepare.conversations import ASKED, GOOD, parse, said
from tests.stages.prepare.encoding import CHATML, encode, trained, unmarked, words

TEMPLATES = ROOT / "stages/penstock/prepare/chat_templates/templates"

FIELD = {"type": "chat", "field_message_training_detail": "detail"}


def span(begin: Any, end: Any, train: Any = True) -> Any:
    return {"begin_offset": begin, "end_offset": end, "train": train}


def trained_of(turns, template=CHATML, **its):
    tokenizer = words(template)
    ids, labels = encode({"messages": turns}, tokenizer, **{**FIELD, **its})
    assert ids == tokenizer.apply_chat_template(turns)["input_ids"]
    return trained(tokenizer, labels).replace("<|im_end|>", ".")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"detail": [span(0, 0), span(4, 4)]}, "a c."),
        ({"detail": [span(4, 4), span(0, 0), span(2, 2, train=False)]}, "a c."),
        ({"detail": json.dumps([span(0, 4)])}, "a b c."),
        ({"detail": [span(0.0, 0.0, 1)]}, "a."),
        ({"detail": [span(0, 0, "true"), span(2, 2, "false")]}, "a."),
        ({"detail": [span(0, 4, train=False)]}, "."),
        ({"detail": [], "train": True}, "a b c."),
        ({"detail": None}, "a b c."),
        ({"detail": [span(0, 0)], "train": True, "weight": None}, "a."),
    ],
)
def test_the_characters_of_a_row_are_trained_with_the_end_of_its_turn(more, expected):
    turns = [said("user", "q"), {**said("assistant", "a b c"), **more}]
    for template in (CHATML, unmarked(CHATML)):
        assert trained_of(turns, template) == expected
    assert trained_of(turns, mask_eos_in_loss=True) == expected[:-1] if expected != "." else True
    both = [*turns, said("user", "q"), said("assistant", "d")]
    assert trained_of(both, train_on_eos="last") == expected[:-1] + "d."


def test_an_empty_list_excludes_a_message_as_in_axolotl():
    first = {**said("assistant", "a"), "detail": []}
    assert trained_of([*ASKED, first, *ASKED, GOOD]) == "4."
    assert parse({"messages": [*ASKED, first]}, **FIELD).trained == (False, False)


def test_characters_of_other_trained_roles_and_of_texts_without_a_template():
    turns = [{**said("user", "x y"), "detail": [span(2, 2)]}, said("assistant", "a")]
    assert trained_of(turns, roles_to_train=["user", "assistant"]).replace(" ", "") == "y.a."
    plain = [{**said("user", "x y"), "detail": None}, {**GOOD, "content": "a b"}]
    plain[1]["detail"] = [span(2, 2)]
    tokenizer = words()
    # Types that need a chat template refuse to be without one.
    document = Renderer(tokenizer, DatasetSettings.model_validate(FIELD)).render(
        parse({"messages": plain}, **FIELD)
    )
    assert [document.text[s.start : s.stop] for s in document.spans or ()] == ["b"]


@pytest.mark.parametrize(
    "content",
    [
        "<think>\nHm, 4.\n</think>\n\n4.\n\nSo 4.",
        "<think>\nHm\n</think>\n\n4.\n\n4.",
        "4.",
        "\n\n4. ",
    ],
)
@pytest.mark.parametrize("place", ["first", "last"])
def test_templates_that_take_reasoning_out_of_a_content_keep_its_characters(content, place):
    """Qwen3's template splits contents at `</think>`, strips both parts, and leaves the reasoning
    out where another question follows."""
    end = len(content.rstrip()) - 1
    answer = {**said("assistant", content), "detail": [span(end - 1, end)]}
    turns = [*ASKED, answer]
    if place == "first":
        turns += [*ASKED, {**said("assistant", "no"), "detail": []}]
    tokenizer = words((TEMPLATES / "qwen3.jinja").read_text())
    ids, labels = encode({"messages": turns}, tokenizer, **FIELD)
    at = [i for i, label in enumerate(labels) if label != -100]
    text = tokenizer.decode(ids)
    before = len(tokenizer.decode(ids[: at[0]]))
    assert tokenizer.decode([ids[i] for i in at]) == "4.<|im_end|>"
    assert text[before:].replace(" ", "").startswith("4.<|im_end|>")


@pytest.mark.parametrize(
    ("detail", "why"),
    [
        ("x", "detail is not JSON"),
        ({"begin_offset": 0}, "detail is an object where a list of entries with begin_offset, e"),
        ([3], r"detail\[0\] is a number where an object"),
        ([{"begin_offset": 0, "train": True}], r"detail\[0\] has no end_offset"),
        ([{"begin_offset": 0, "end_offset": 0}], r"detail\[0\] has no train"),
        ([span(0, 5)], r"detail\[0\] is from 0 to 5, which the content of 5 characters does not"),
        ([span(3, 2)], r"detail\[0\] is from 3 to 2"),
        ([span(-1, 2)], r"detail\[0\].begin_offset is -1; offsets count from 0"),
        ([span(0, 1.5)], r"detail\[0\].end_offset is 1.5, not a whole number"),
        ([span(True, 1)], r"detail\[0\].begin_offset is True, not a whole number"),
        ([span("0", 1)], r"detail\[0\].begin_offset is a string, not a whole number"),
        ([span(0, 1, "maybe")], r"detail\[0\].train is 'maybe'; write true, false, 0 or 1"),
        ([span(3, 4), span(0, 3)], r"detail\[1\] and \[0\] overlap at 3"),
        ([{**span(0, 1), "weight": 2}], r"detail\[0\] has weight; it may have begin_offset"),
    ],
)
def test_entries_without_a_meaning_are_refused_by_name(detail, why):
    answer = {**said("assistant", "a b c"), "detail": detail}
    with pytest.raises(BadRecord, match=rf"messages\[1\]\.{why}"):
        parse({"messages": [*ASKED, answer]}, **FIELD)


@pytest.mark.parametrize(
    ("turns", "why"),
    [
        (
            [{**ASKED[0], "detail": [span(0, 1)]}, GOOD],
            r"messages\[0\].detail trains characters, but roles_to_train lacks its role",
        ),
        (
            [*ASKED, {**GOOD, "train": False, "detail": [span(0, 0)]}],
            r"messages\[1\].detail trains characters, but a key beside it excludes the message",
        ),
        ([*ASKED, {**GOOD, "content": " ", "detail": [span(0, 0)]}], "of a content that is blank"),
    ],
)
def test_ranges_that_contradict_the_message_are_refused(turns, why):
    with pytest.raises(BadRecord, match=why):
        parse({"messages": turns}, **FIELD)


def test_ranges_of_untrained_messages_that_train_nothing_are_harmless():
    asked = {**ASKED[0], "detail": [span(0, 1, train=False)]}
    masked = {**GOOD, "train": False, "detail": [span(0, 0, train=False)]}
    assert parse({"messages": [asked, masked]}, **FIELD).trained == (False, False)


def test_a_template_that_changes_the_characters_is_refused_by_name():
    twice = "{{- m.content + (m.content | length | string) + m.content + '<|im_end|>' }}"
    template = unmarked(CHATML).replace("{{- m.content + '<|im_end|>' }}", twice)
    answer = {**said("assistant", "a b"), "detail": [span(0, 0)]}
    fault = encode({"messages": [*ASKED, answer]}, words(template), **FIELD)
    assert fault.why.startswith("the chat template changes what message 2 says, so it is not known")


def test_all_tokens_of_prompts_and_only_some_characters_exclude_each_other():
    source = {"path": "x", "type": "chat", "field_message_training_detail": "detail"}
    [line] = faults_of(data={"datasets": [source], "train_on_prompt": True})
    assert line.startswith("data.datasets.0.field_message_training_detail: names the characters")
