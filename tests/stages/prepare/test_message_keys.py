"""Messages under the keys and roles of other libraries, and those that say they are not trained."""

import pytest

from penstock.prepare.bad_records import BadRecord
from tests.config.values import faults_of
from tests.stages.prepare.conversations import ASKED, GOOD, LONG, expected, parse, said, told
from tests.stages.prepared import prepare, run, write_lines

MASKED = [
    {"weight": 0},
    {"weight": 0.0},
    *(
        {name: value}
        for name in ("train", "training", "trainable", "train_on", "loss", "loss_mask")
        for value in (False, 0, "false")
    ),
    {"masked": True},
    {"masked": 1},
    {"mask": True},
    {"train": False, "weight": 0, "masked": True, "loss": None},
]
OPPOSITE = {"True": False, "False": True, "0": 1, "0.0": 1.0, "1": 0, "false": "true", "None": None}


@pytest.mark.parametrize("kind", ["chat", "sharegpt", "preference"])
@pytest.mark.parametrize("flags", MASKED, ids=str)
def test_an_answer_is_trained_unless_it_says_otherwise(flags, kind):
    opposite = {name: OPPOSITE[str(value)] for name, value in flags.items()}
    found = []
    for more in (flags, opposite, {}):
        first, last = ({**turn, **more} for turn in (said("assistant", "Hi!"), GOOD))
        turns = [said("user", "Hi"), first, *ASKED, last]
        if kind == "preference":
            record = {"prompt": turns[:-1], "chosen": last, "rejected": "5"}
            found.append(parse(record, type=kind).chosen)
        else:
            name = "messages" if kind == "chat" else "conversations"
            found.append(parse({name: turns}, type=kind))
    masked, trained, unsaid = found
    assert trained == unsaid
    assert masked.messages == unsaid.messages  # the template sees no flag
    assert not any(masked.trained)
    assert unsaid.trained == (False, kind != "preference", False, True)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (
            {"train": True, "weight": 0},
            r"messages\[1\] has weight: 0 and train: True, which c",
        ),
        ({"loss": False, "masked": False}, "has loss: False and masked: False"),
        ({"loss": 1.73}, r"messages\[1\].loss is 1.73; write true, false, 0 or 1"),
        ({"train": "maybe"}, "train is 'maybe'; write true, false, 0 or 1"),
        ({"train": ["x"]}, "train is a list of 1; write"),
        ({"mask": 1}, r"mask is 1; write true \(not trained\) or false, since the number may mean"),
    ],
)
def test_a_flag_without_a_meaning_is_refused_by_name(flags, why):
    with pytest.raises(BadRecord, match=why):
        parse({"messages": [*ASKED, {**GOOD, **flags}]}, type="chat")


@pytest.mark.parametrize("flag", [{"train": True}, {"loss": 1}, {"masked": False}], ids=str)
def test_a_users_turn_that_is_to_be_trained_is_not_ignored(flag):
    [name] = flag
    with pytest.raises(
        BadRecord, match=rf"messages\[0\].{name} is .*; roles_to_train does not have user"
    ):
        parse({"messages": [{**ASKED[0], **flag}, GOOD]}, type="chat")
    masked = {**ASKED[0], name: not flag[name], "weight": 1}
    assert parse({"messages": [masked, GOOD]}, type="chat") == expected(ASKED)


def test_the_named_flag_is_the_only_one():
    turns = [*ASKED, {**GOOD, "train": False, "ok": True, "masked": True}]
    for flag, is_trained in (("ok", True), ("train", False), ("masked", False)):
        record = parse({"messages": turns}, type="chat", field_message_training=flag)
        assert record.trained == (False, is_trained)


def test_a_flag_of_a_part_is_not_ignored():
    parts = [{"type": "text", "text": "4", "train": False}, {"type": "text", "text": "!"}]
    with pytest.raises(BadRecord, match=r"content\[0\] has train, but a message is trained whole"):
        parse({"messages": [*ASKED, {**GOOD, "content": parts}]}, type="chat")


@pytest.mark.parametrize(
    ("its", "turns"),
    [
        ({"field_message_role": "from", "field_message_content": "value"}, told([*LONG, GOOD])),
        (
            {"field_message_role": "who"},
            [{"who": turn["role"], "content": turn["content"]} for turn in [*LONG, GOOD]],
        ),
        (
            {"field_message_content": "text"},
            [{"role": turn["role"], "text": turn["content"]} for turn in [*LONG, GOOD]],
        ),
    ],
)
@pytest.mark.parametrize("kind", ["chat", "preference", "kto"])
def test_role_and_content_are_read_where_their_fields_say(its, turns, kind):
    record = {"messages": turns, "rejected_response": "5", "label": True}
    found = parse(record, type=kind, **its)
    sides = {"preference": lambda: found.chosen, "kto": lambda: found.conversation}
    conversation = sides.get(kind, lambda: found)()
    assert conversation.messages == [*LONG, GOOD]
    wrong = {**record, "messages": [{**turn, "role": "user", "content": "x"} for turn in turns]}
    if its == {"field_message_role": "from", "field_message_content": "value"}:
        with pytest.raises(BadRecord, match="has both role and from"):
            parse(wrong, type=kind, **its)


def test_roles_have_the_names_that_are_given_to_them():
    roles = {"user": ["customer"], "assistant": ["agent"], "tool_call": ["act"], "tool": ["got"]}
    turns = [
        *(said("customer", "x"), said("agent", "y"), said("act", '{"name": "f"}')),
        *(said("got", "z"), said("assistant", "4")),
    ]
    found = parse({"messages": turns}, type="chat", message_roles=roles)
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert found.messages == [
        *(said("user", "x"), {**said("assistant", "y"), "tool_calls": calls}),
        *(said("tool", "z"), GOOD),
    ]
    # A name that is known otherwise has the role that it is given.
    swapped = parse(
        {"conversations": told([*ASKED, GOOD])[::-1]},
        type="sharegpt",
        message_roles={"user": ["gpt"], "assistant": ["human"]},
    )
    assert [turn["role"] for turn in swapped.messages] == ["user", "assistant"]
    assert "message_roles" in "".join(
        faults_of(
            data={
                "datasets": [
                    {"path": "x", "type": "chat", "message_roles": {"user": ["a"], "tool": ["a"]}}
                ]
            }
        )
    )


@pytest.mark.parametrize("kind", ["chat", "sharegpt", "preference", "kto"])
def test_system_messages_are_dropped_from_messages_and_columns(kind):
    answers = {"rejected_response": "5", "label": True, "system": "column"}
    found = []
    for turns in (LONG, LONG[1:]):
        record = {"messages": [*turns, GOOD], "conversations": [*turns, GOOD], **answers}
        its = {"drop_system_message": True, "field_system": "system"}
        found.append(parse(record, type=kind, **its))
    sides = {"preference": lambda: found[0].chosen, "kto": lambda: found[0].conversation}
    assert sides.get(kind, lambda: found[0])().messages == [*LONG[1:], GOOD]
    assert found[0] == found[1]


def test_fields_of_messages_are_refused_for_types_without_messages():
    for field, value in (
        ("field_message_role", "from"),
        ("field_message_content", "value"),
        ("field_message_training", "train"),
        ("field_message_training_detail", "training_detail"),
        ("message_roles", {"user": ["x"]}),
        ("drop_system_message", True),
    ):
        [line] = faults_of(data={"datasets": [{"path": "x", "type": "text", field: value}]})
        assert line.startswith(f"data.datasets.0.{field}: type: text does not read it")


def test_a_data_set_with_other_names_of_roles_is_tokenized(tmp_path):
    """The names are a mapping, and a process has one tokenizer for settings with equal hashes."""
    records = [{"messages": [*ASKED, said("bot", word)]} for word in ("Hm", "Ah")]
    file = write_lines(tmp_path / "chats.jsonl", records)
    roles = {"type": "chat", "message_roles": {"assistant": ["bot"]}}
    _, facts = run(prepare((file, roles)), tmp_path / "out")
    assert facts["rows"]["train"] == len(records)
