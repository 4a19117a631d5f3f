"""ERNIEKit's turns and ranked responses."""

import json

import pytest

from penstock.prepare.bad_records import BadRecord
from penstock.prepare.formats.conversation import Conversation, PreferencePair
from tests.stages.prepare.conversations import ASKED, BAD, GOOD, LONG, expected, parse, said

TURNS = {"src": ["Hi", " 2 + 2? "], "tgt": ["Hi!", "4"]}


def test_turns_are_questions_and_answers_that_are_trained_unless_labelled_otherwise():
    prompt = [said("user", "Hi"), said("assistant", "Hi!"), *ASKED]
    every = Conversation([*prompt, GOOD], None, (False, True, False, True))
    assert parse(TURNS, type="sft_turns") == every
    assert parse({**TURNS, "label": [0, 1]}, type="sft_turns") == expected(prompt)
    assert parse({"src": "2 + 2?", "tgt": "4"}, type="sft_turns") == expected(ASKED)


@pytest.mark.parametrize(
    "system",
    [
        {"system": "count"},
        {"src": ["count", *TURNS["src"]], "is_system": 1},
        {"src": ["count", *TURNS["src"]], "tgt": ["", *TURNS["tgt"]], "is_system": 1},
    ],
)
def test_a_system_prompt_of_turns_is_a_column_or_the_first_question(system):
    record = {**TURNS, **system}
    record["label"] = [0] * (len(record["tgt"]) - 1) + [1]
    assert parse(record, type="sft_turns") == expected(LONG)


RANKED = {"src": TURNS["src"], "tgt": ["Hi!"], "response": [["5"], ["4"]], "sort": [0, 1]}


@pytest.mark.parametrize(
    "record",
    [
        {**RANKED, "system": "count"},
        {**RANKED, "system": "count", "response": ["4", "5"], "sort": [2.5, -1]},
        {**RANKED, "src": ["count", *TURNS["src"]], "is_system": 1},
    ],
)
def test_the_response_of_the_higher_rank_is_chosen(record):
    assert parse(record, type="preference_turns") == PreferencePair(
        expected(LONG), expected(LONG, BAD)
    )


def test_responses_may_go_on_for_several_turns():
    record = {"src": "2 + 2?", "response": [["4", "sure?", "yes"], ["5"]], "sort": [1, 0]}
    found = parse(record, type="preference_turns").chosen
    assert [m["content"] for m in found.messages] == ["2 + 2?", "4", "sure?", "yes"]
    assert found.trained == (False, True, False, True)


def test_real_turns_are_what_their_records_say(shared):
    folder = shared / "examples" / "erniekit_data"
    records = [
        json.loads(line)
        for name in ("sft-eval.jsonl", "sft-train.head3.jsonl")
        for line in (folder / name).read_text().splitlines()
    ]
    assert len(records) == 13
    for record in records:
        found = parse(record, type="sft_turns")
        assert [m["content"] for m in found.messages] == [
            text.strip() for pair in zip(record["src"], record["tgt"], strict=True) for text in pair
        ]
    pairs = (folder / "dpo-eval.records-2-and-7.jsonl").read_text().splitlines()
    for record in map(json.loads, pairs):
        found = parse(record, type="preference_turns")
        better = max(zip(record["sort"], record["response"], strict=True))[1]
        assert found.chosen.messages[-1]["content"] == better[-1].strip()
        assert found.chosen.messages[:-1] == found.rejected.messages[:-1]


SFT = {"type": "sft_turns"}
DPO = {"type": "preference_turns"}


@pytest.mark.parametrize(
    ("record", "its", "reason", "why"),
    [
        ({**TURNS, "tgt": ["x"]}, SFT, "bad_value", "src has 2 texts of the user's and tgt 1"),
        ({**TURNS, "tgt": ["x", " "]}, SFT, "empty", "tgt has an empty text"),
        ({**TURNS, "src": ["", "x"]}, SFT, "empty", "src has an empty text"),
        ({**TURNS, "src": ["x", 1]}, SFT, "wrong_type", r"src\[1\] is a number"),
        ({**TURNS, "src": {}}, SFT, "wrong_type", "src is an object where a list of texts"),
        ({**TURNS, "label": [1]}, SFT, "bad_value", "label is a list of 1 where a list of 2"),
        ({**TURNS, "label": [1, 0.5]}, SFT, "bad_value", r"label\[1\] is 0.5 where 0 or 1"),
        ({**TURNS, "is_system": 2}, SFT, "bad_value", "is_system is 2 where 0 or 1"),
        (
            {**TURNS, "is_system": 1, "system": "s"},
            SFT,
            "bad_value",
            "a system prompt of its own too",
        ),
        ({"src": "s", "tgt": "a", "is_system": 1}, SFT, "bad_value", "nothing but a system prompt"),
        ({**RANKED, "tgt": []}, DPO, "bad_value", "tgt 0 where 1 are meant"),
        ({**RANKED, "response": ["4"]}, DPO, "wrong_type", "response is a list of 1 where"),
        ({**RANKED, "response": [["4", "x"], ["5"]]}, DPO, "bad_value", r"response\[0\] has 2"),
        ({**RANKED, "response": [["4"], [" "]]}, DPO, "empty", r"response\[1\] has an empty text"),
        (
            {**RANKED, "response": ["4", "4"]},
            DPO,
            "same_answers",
            r"response\[1\] and response\[0\]",
        ),
        ({**RANKED, "sort": [1, 1]}, DPO, "bad_value", "sort ranks both responses alike"),
        ({**RANKED, "sort": [1, "0"]}, DPO, "wrong_type", "sort is a list of 2 where"),
    ],
)
def test_what_is_wrong_with_turns_is_said(record, its, reason, why):
    with pytest.raises(BadRecord, match=why) as raised:
        parse(record, **its)
    assert raised.value.reason == reason
