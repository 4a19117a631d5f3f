"""Answers that are compared or judged, in all the ways they are nested."""

import json
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.prepare.bad_records import BadRecord
from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.formats.conversation import PreferencePair, RatedCompletion
from penstock.prepare.settings import DatasetSettings
from penstock.rows.schema import IGNORED
from penstock.rows.tokenizer import byte_tokenizer
from tests.stages.prepare.conversations import ASKED, BAD, GOOD, LONG, expected, parse, said, told

PREFERENCE = {"type": "preference"}


def answers_of(form, prompt):
    """The better and the worse answer in one of the forms in which they are found."""
    better, worse = {
        "text": (GOOD["content"], BAD["content"]),
        "message": (GOOD, BAD),
        "messages": ([GOOD], [BAD]),
        "spoken": (told([GOOD])[0], told([BAD])[0]),
        "whole": ([*prompt, GOOD], [*prompt, BAD]),
        "nested": ({"messages": [*prompt, GOOD]}, {"conversations": told([*prompt, BAD])}),
    }[form]
    return {"chosen": better, "rejected": worse}


def prompts_of(form, prompt):
    return {
        "text": {"prompt": prompt[-1]["content"]},
        "messages": {"prompt": prompt},
        "nested": {"prompt": {"messages": prompt}},
        "conversations": {"conversations": told(prompt)},
        "beside": {"messages": prompt, "prompt": None},
        "none": {},
    }[form]


ANSWERS = ("text", "message", "messages", "spoken", "whole", "nested")
PROMPTS = ("text", "messages", "nested", "conversations", "beside", "none")


@pytest.mark.parametrize("prompt", [ASKED, LONG], ids=["one turn", "several turns"])
@pytest.mark.parametrize(("asked", "answered"), list(product(PROMPTS, ANSWERS)))
def test_a_pair_is_the_same_however_it_is_nested(asked, answered, prompt):
    record = prompts_of(asked, prompt) | answers_of(answered, prompt)
    if asked == "text" and answered not in ("whole", "nested"):
        prompt = ASKED  # all that such a record has
    if asked == "none" and answered not in ("whole", "nested"):
        with pytest.raises(BadRecord, match="no column 'prompt'; it has chosen, rejected"):
            parse(record, **PREFERENCE)
        return
    assert parse(record, **PREFERENCE) == PreferencePair(expected(prompt), expected(prompt, BAD))


@pytest.mark.parametrize("name", ["rejected", "rejected_response"])
def test_a_conversation_may_end_with_the_better_answer(name):
    record = {"messages": [*LONG, GOOD], name: "5"}
    assert parse(record, **PREFERENCE) == PreferencePair(expected(LONG), expected(LONG, BAD))


def test_answers_of_several_turns_part_where_the_assistant_first_says_something_else():
    shared = [*LONG, said("assistant", "Let me see."), said("user", "Well?")]
    other = [said("assistant", "Why?"), said("user", "Just so."), BAD]
    record = {"chosen": [*shared, GOOD], "rejected": [*LONG, *other]}
    found = parse(record, **PREFERENCE)
    assert found.chosen.messages == [*shared, GOOD]
    assert found.chosen.trained == (False,) * 4 + (True, False, True)
    assert found.rejected.messages == [*LONG, *other]
    assert found.rejected.trained == (False,) * 4 + (True, False, True)


def test_a_prompt_never_ends_with_the_result_of_only_one_sides_call():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    sides = [
        [*ASKED, call, said("tool", result), answer] for result, answer in (("4", GOOD), ("5", BAD))
    ]
    found = parse(dict(zip(("chosen", "rejected"), sides, strict=True)), **PREFERENCE)
    assert found.chosen.trained == found.rejected.trained == (False, True, False, True)


def test_a_pair_has_tools_and_a_system_prompt_on_both_sides():
    tool = {"type": "function", "function": {"name": "add"}}
    record = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5", "tools": [tool], "s": "count"}
    prompt = [said("system", "count"), *ASKED]
    assert parse(record, **PREFERENCE, field_system="s") == PreferencePair(
        expected(prompt, GOOD, [tool]), expected(prompt, BAD, [tool])
    )


@pytest.mark.parametrize("answers", ["text", "message", "spoken", "messages"])
def test_answers_to_an_instruction_are_to_what_alpaca_makes_of_it(answers):
    asked = {"instruction": "Add.", "input": "2, 2", "system": "count", "history": [["Hi", "Hi!"]]}
    prompt = parse({**asked, "output": "4"}, type="alpaca").messages[:-1]
    assert [m["content"] for m in prompt] == ["count", "Hi", "Hi!", "Add.\n\n2, 2"]
    record = asked | answers_of(answers, prompt)
    assert parse(record, **PREFERENCE) == PreferencePair(expected(prompt), expected(prompt, BAD))
    moved = {"q": "2 + 2?", "c": "ten", **answers_of(answers, prompt)}
    prompt = [said("user", "2 + 2?\n\nten")]
    found = parse(moved, **PREFERENCE, field_instruction="q", field_input="c")
    assert found == PreferencePair(expected(prompt), expected(prompt, BAD))


def test_a_prompt_or_whole_conversations_come_before_an_instruction():
    for rest in ({"prompt": "2 + 2?", **answers_of("text", ASKED)}, answers_of("whole", ASKED)):
        found = parse({"instruction": "wrong", **rest}, **PREFERENCE)
        assert found == PreferencePair(expected(ASKED), expected(ASKED, BAD))


SPEAKERS = {"user": "Human", "assistant": "Assistant"}
DIALOGUES = st.lists(
    st.builds(
        said,
        st.sampled_from(sorted(SPEAKERS)),
        st.sampled_from(["", "Hi", "Human: x", "a\nAssistant: b", "c\n\nd Human:", "Human"]),
    ),
    max_size=4,
)


@given(DIALOGUES, DIALOGUES, st.sampled_from(["", "\n"]))
def test_dialogues_of_text_are_the_conversations_that_they_spell(shared, tail, end):
    prompt = [said("user", "Well?"), *shared]
    sides = {"chosen": [*prompt, GOOD], "rejected": [*prompt, BAD, *tail, BAD]}
    texts = {
        name: "".join(f"\n\n{SPEAKERS[m['role']]}: {m['content']}{end}" for m in messages)
        for name, messages in sides.items()
    }
    assert parse(texts, **PREFERENCE) == parse(sides, **PREFERENCE)


@pytest.mark.parametrize("worse", ["5", "Human: 2 + 2? Assistant: 5", "So:\n\nHuman: 2?"])
def test_texts_that_are_no_dialogues_have_no_prompt(worse):
    record = {"chosen": "\n\nHuman: 2 + 2?\n\nAssistant: 4", "rejected": worse}
    with pytest.raises(BadRecord):
        parse(record, **PREFERENCE)


def test_a_dialogue_that_answers_an_instruction_is_text():
    better, worse = (f"Human: 2 + 2?\n\nAssistant: {n}" for n in "45")
    record = {"instruction": "Write a dialogue.", "chosen": better, "rejected": worse}
    found = parse(record, **PREFERENCE)
    assert [side.messages[-1]["content"] for side in (found.chosen, found.rejected)] == [
        better,
        worse,
    ]


def test_equal_answers_are_left_out_for_a_reason_of_their_own():
    for better, worse in (("4", " 4\n"), ([*ASKED, GOOD], [*ASKED, GOOD])):
        with pytest.raises(BadRecord, match="chosen and rejected are the same") as raised:
            parse({"prompt": "2 + 2?", "chosen": better, "rejected": worse}, **PREFERENCE)
        assert raised.value.reason == "same_answers"


def test_every_real_pair_is_what_its_record_says(shared):
    records = json.loads((shared / "data" / "preference" / "dpo_en_demo.json").read_text())
    assert len(records) == 300
    for record in records:
        found = parse(record, **PREFERENCE)
        for name, side in (("chosen", found.chosen), ("rejected", found.rejected)):
            assert told(side.messages) == [*record["conversations"], record[name]]
            assert side.trained == (False,) * len(record["conversations"]) + (True,)


KTO = {"type": "kto"}


@pytest.mark.parametrize("prompt", [ASKED, LONG], ids=["one turn", "several turns"])
@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        *product(("messages", "conversations"), ("4", GOOD, [GOOD])),
        ("messages", "whole"),
        ("none", "whole"),
        ("ended", None),
    ],
)
def test_a_judged_answer_is_the_same_however_it_is_nested(asked, answer, prompt):
    record = {"messages": [*prompt, GOOD]} if asked == "ended" else prompts_of(asked, prompt)
    record |= {"completion": [*prompt, GOOD] if answer == "whole" else answer, "label": True}
    assert parse(record, **KTO) == RatedCompletion(expected(prompt), desirable=True)


@pytest.mark.parametrize(
    ("label", "desirable"),
    [
        *((label, True) for label in (True, 1, 1.0, "1", "true", "Desirable", "chosen", "good")),
        *(
            (label, False)
            for label in (False, 0, 0.0, "0", "FALSE", "undesirable", "rejected", "bad")
        ),
    ],
)
def test_verdicts_are_read_in_their_usual_words(label, desirable):
    record = {"prompt": "2 + 2?", "completion": "4", "label": label}
    assert parse(record, **KTO).desirable is desirable


ANSWERED = {"prompt": "p", "chosen": "c", "rejected": "r"}
JUDGED = {"prompt": "p", "completion": "c", "label": True}


@pytest.mark.parametrize(
    ("record", "its", "reason", "why"),
    [
        ({"prompt": "p", "chosen": "c"}, PREFERENCE, "missing_column", "no column 'rejected'"),
        ({**ANSWERED, "prompt": " "}, PREFERENCE, "empty", "prompt is empty"),
        ({**ANSWERED, "prompt": 3}, PREFERENCE, "wrong_type", "prompt is a number where text or"),
        ({**ANSWERED, "chosen": ""}, PREFERENCE, "empty", "chosen is empty"),
        ({**ANSWERED, "rejected": [said("assistant", " ")]}, PREFERENCE, "empty", "in rejected is"),
        ({**ANSWERED, "prompt": [GOOD]}, PREFERENCE, "bad_value", "prompt ends with the assistant"),
        (
            {**ANSWERED, "chosen": [GOOD, *ASKED]},
            PREFERENCE,
            "bad_value",
            "chosen does not end with an answer of the assistant",
        ),
        (
            {**ANSWERED, "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
            PREFERENCE,
            "bad_value",
            "chosen and rejected do not both begin with what is in prompt",
        ),
        (
            {"chosen": [*ASKED, GOOD], "rejected": [said("user", "3 + 3?"), BAD]},
            PREFERENCE,
            "bad_value",
            "chosen and rejected do not both begin with the same prompt",
        ),
        (
            {"messages": [GOOD], "rejected_response": "x"},
            PREFERENCE,
            "bad_value",
            "messages begins with the assistant",
        ),
        (
            {**ANSWERED, "chosen": {"messages": [{"role": "x"}]}},
            PREFERENCE,
            "bad_value",
            r"chosen.messages\[0\].role is 'x'",
        ),
        ({**JUDGED, "label": 2}, KTO, "bad_value", "label is '2'; write true or false"),
        ({**JUDGED, "label": None}, KTO, "bad_value", "label is null"),
        ({"prompt": "p", "label": 1}, KTO, "missing_column", "no column 'completion'"),
        ({"completion": "c", "label": 1}, KTO, "missing_column", "no column 'prompt'"),
        ({"messages": ASKED, "label": 1}, KTO, "missing_column", "no column 'completion'"),
        ({**JUDGED, "completion": [*ASKED, GOOD]}, KTO, "bad_value", "does not begin with what"),
        ({**JUDGED, "completion": [GOOD, *ASKED]}, KTO, "bad_value", "does not end with an answer"),
    ],
)
def test_what_is_wrong_with_an_answer_is_said(record, its, reason, why):
    with pytest.raises(BadRecord, match=why) as raised:
        parse(record, **its)
    assert raised.value.reason == reason


SCORED = {**PREFERENCE, "field_chosen_score": "good", "field_rejected_score": "bad"}


def test_scores_are_read_where_their_columns_are_named():
    record = {"prompt": "p", "chosen": "c", "rejected": "r", "good": 8, "bad": 2.5}
    assert parse(record, **PREFERENCE).score_gap is None
    assert parse(record, **SCORED).score_gap == 5.5
    assert parse({**record, "bad": 8}, **SCORED).score_gap == 0


@pytest.mark.parametrize(
    ("scores", "reason", "why"),
    [
        ({"good": 1}, "missing_column", "no column 'bad'"),
        ({"good": "8", "bad": 2}, "wrong_type", "good is a string where a number is meant"),
        ({"good": True, "bad": 0}, "wrong_type", "good is a boolean where a number is meant"),
        ({"good": 3, "bad": float("nan")}, "bad_value", "bad is nan"),
        ({"good": 10**400, "bad": 2}, "bad_value", "good is inf"),
        ({"good": 2e38, "bad": -2e38}, "bad_value", "good is 2e.38 and bad is -2e.38: too far"),
        ({"good": 2, "bad": 2.5}, "bad_value", "the worse answer has the higher score"),
    ],
)
def test_scores_that_say_nothing_are_a_fault(scores, reason, why):
    with pytest.raises(BadRecord, match=why) as raised:
        parse({"prompt": "p", "chosen": "c", "rejected": "r", **scores}, **SCORED)
    assert raised.value.reason == reason


def tokens_of(record: Any, tokenizer: Any, **its: Any) -> Any:
    """What becomes of a record: all of its text and the trained part, of each side; or a fault."""
    found = Encoder(DatasetSettings(**its), tokenizer)([record])
    if found.faults:
        return found.faults[0]
    sides = [side[0] for side in found.sides]
    return [
        (tokenizer.decode(ids), tokenizer.decode(ids[labels != IGNORED]))
        for ids, labels, _ in sides
    ]


def test_without_a_chat_template_answers_are_text_after_their_prompt():
    plain: Any = byte_tokenizer()
    plain.chat_template = None
    asked = {"prompt": "2 + 2?", "s": "count"}
    texts = [(f"count\n\n2 + 2?\n\n{n}<|im_end|>", f"{n}<|im_end|>") for n in "45"]
    pair = tokens_of(
        {**asked, "chosen": "4", "rejected": "5"}, plain, type="preference", field_system="s"
    )
    assert pair == texts
    judged = {**asked, "completion": "5", "label": False}
    assert tokens_of(judged, plain, type="kto", field_system="s") == texts[1:]
    question = {"instruction": "2 + 2?", "output": "4", "system": "count"}
    assert tokens_of(question, plain, type="alpaca") == texts[:1]
    several = tokens_of({**question, "history": [["q", "a"]]}, plain, type="alpaca")
    assert several.reason == "template"


def test_tools_that_a_chat_template_would_leave_out_are_a_fault():
    tokenizer: Any = byte_tokenizer()
    called = {"role": "assistant", "content": "x", "tool_calls": [{"name": "f"}]}
    for its, name in (({"tools": [{"name": "f"}]}, "tools"), ({}, "tool_calls")):
        fault = tokens_of({"messages": [*ASKED, called], **its}, tokenizer, type="chat")
        assert fault.why == f"the chat template has no place for {name}"
