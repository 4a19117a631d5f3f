"""Types that are not written are told from first records, and never guessed."""

import json

import pytest

from penstock.config.loading.load import loads
from penstock.core.cache.stage import stage_key
from penstock.core.errors import ConfigError
from penstock.pipeline.plan import plan
from penstock.prepare.infer_type import infer_format
from penstock.prepare.stage import Prepare
from tests.config.values import smallest

TURNS = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
SHARED = [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}]


def told(record, objective="sft", **named):
    found = infer_format([record], named, objective=objective, location="data.datasets.0")
    return found.settings()


@pytest.mark.parametrize(
    ("record", "values"),
    [
        ({"input_ids": [1], "labels": [1]}, {"type": "tokenized"}),
        ({"input_ids": [1], "labels": [1], "text": "a"}, {"type": "tokenized"}),
        ({"messages": TURNS}, {"type": "chat"}),
        ({"messages": json.dumps(TURNS)}, {"type": "chat"}),
        ({"prompt": "1", "prompt_id": "x", "messages": TURNS}, {"type": "chat"}),
        ({"conversations": SHARED, "id": 3}, {"type": "sharegpt"}),
        ({"conversations": TURNS}, {"type": "chat", "field_messages": "conversations"}),
        ({"messages": SHARED}, {"type": "sharegpt", "field_messages": "messages"}),
        ({"instruction": "1", "input": "", "output": "2"}, {"type": "alpaca"}),
        ({"instruction": "1", "output": "2"}, {"type": "alpaca"}),
        (
            {"prompt": "1", "completion": "2"},
            {"type": "instruction", "field_instruction": "prompt", "field_output": "completion"},
        ),
        ({"prompt": "1", "completion": "2", "label": True}, {"type": "kto"}),
        ({"prompt": "1", "completion": "2", "label": "good"}, {"type": "kto"}),
        (
            {"prompt": "1", "completion": "2", "label": "sports"},
            {"type": "instruction", "field_instruction": "prompt", "field_output": "completion"},
        ),
        ({"prompt": "1", "chosen": "2", "rejected": "3"}, {"type": "preference"}),
        ({"chosen": TURNS, "rejected": TURNS}, {"type": "preference"}),
        ({"text": "a"}, {"type": "text"}),
        ({"src": ["1"], "tgt": ["2"]}, {"type": "sft_turns"}),
    ],
    ids=lambda value: "+".join(value),
)
def test_usual_columns_tell_the_type(record, values):
    assert told(record) == values


def test_a_column_that_is_null_at_first_is_seen_in_later_records():
    records = [{"messages": None}, {"messages": TURNS}]
    assert infer_format(records, {}, objective="sft", location="").type == "chat"


def test_written_columns_tell_the_type_too():
    assert told({"q": "1", "a": "2"}, field_instruction="q", field_output="a")["type"] == "alpaca"
    assert told({"talk": SHARED}, field_messages="talk") == {"type": "sharegpt"}
    assert told({"body": "x"}, field_text="body") == {"type": "text"}


def test_several_types_that_fit_are_an_error_with_the_columns_unless_the_objective_decides():
    both = {"instruction": "1", "input": "", "output": "2", "text": "12"}
    with pytest.raises(ConfigError, match=r"instruction, input, output, text") as caught:
        told(both)
    assert "Write type: alpaca, or type: text." in str(caught.value)
    assert told(both, objective="pretrain") == {"type": "text"}
    feedback = {"prompt": "1", "messages": TURNS, "chosen": TURNS, "rejected": TURNS}
    assert told(feedback, objective="preference") == {"type": "preference"}
    with pytest.raises(ConfigError, match="fit 2 types"):
        told(feedback)


@pytest.mark.parametrize(
    ("record", "proposal"),
    [
        (
            {"question": "1", "answer": "2"},
            "Write type: instruction, field_instruction: question, field_output: answer.",
        ),
        (
            {"instruction": "1", "context": "", "response": "2", "category": "x"},
            "Write type: instruction, field_instruction: instruction, field_input: context, "
            "field_output: response.",
        ),
        (
            {"prompt": TURNS[:1], "completion": TURNS[1:]},
            "Join the messages of prompt and completion in one column, messages",
        ),
        ({"chat": TURNS}, "Write type: chat, field_messages: chat."),
        ({"talk": SHARED}, "Write type: sharegpt, field_messages: talk."),
        ({"body": "x", "n": 3}, "Write type: text, field_text: body."),
        ({"a": 1}, "docs/guide/own-data.md"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_unusual_columns_are_an_error_that_says_what_to_write(record, proposal):
    with pytest.raises(ConfigError) as caught:
        told(record)
    assert ", ".join(record) in str(caught.value)
    assert proposal in str(caught.value)


def test_a_type_that_is_told_has_the_key_of_the_same_type_written(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": TURNS}) + "\n")

    def planned(**its):
        data = {"datasets": [{"path": str(file), **its}]}
        return plan(loads(smallest(data=data)), ("prepare",))

    told, written = planned(), planned(type="chat")
    assert stage_key(told.steps[0].stage) == stage_key(written.steps[0].stage)
    assert [f"data.datasets.0 ({file}) is read as type: chat" in each for each in told.notes] == [
        True
    ]
    assert not written.notes


def test_rules_of_types_hold_for_a_type_that_is_told(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "1", "chosen": "2", "rejected": "3"}\n')
    run = loads(smallest(data={"datasets": [{"path": str(file)}]}))
    with pytest.raises(ConfigError, match="sft cannot train on preference samples"):
        plan(run, ("pack",))
    objective = {"objective": "preference"}
    planned = plan(loads(smallest(data={"datasets": [{"path": str(file)}]}, train=objective)))
    stage = planned.step("prepare").stage
    assert isinstance(stage, Prepare)
    assert stage.settings.kind == "preference"
