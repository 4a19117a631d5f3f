"""The trained tokens of conversations are exactly those that the assistant says."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.core.extensions import FORMATS
from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.settings import DatasetSettings
from tests.stages.prepare.conversations import said
from tests.stages.prepare.encoding import (
    CHATML,
    HEADERS,
    TEMPLATES,
    encode,
    trained,
    unmarked,
    words,
)

GSM8K: Any = {"type": "instruction", "field_instruction": "question", "field_output": "answer"}
TEXT = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n\t.,'日é👩\u200d1"), max_size=14
)
CHATS = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXT), min_size=1, max_size=6
).map(lambda turns: [said(role, content) for role, content in turns])
ASKED = CHATS.filter(lambda messages: messages[0]["role"] != "assistant")
KINDS = ["bytes", "nfc", "greedy", "pieces"]


def judged(tokenizer: Any, messages: Any, tools: Any = None) -> tuple[list[int], list[int]]:
    """Ids and labels as transformers has them."""
    found = tokenizer.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    pairs = zip(found["input_ids"], found["assistant_masks"], strict=True)
    return found["input_ids"], [token if mask else -100 for token, mask in pairs]


@pytest.mark.slow
@settings(deadline=None)
@given(CHATS, st.sampled_from(KINDS))
@example([said("user", "\u0958"), said("assistant", "\u212b" * 3)], "nfc")  # as long as before
def test_chat_trains_what_transformers_marks_as_the_assistants(messages, kind):
    tokenizer = words(CHATML, kind)
    mine = encode({"messages": messages}, tokenizer, type="chat")
    ids, labels = judged(tokenizer, messages)
    if set(labels) == {-100}:
        assert mine.reason == "no_trained_tokens"
    else:
        assert mine == (ids, labels)


@pytest.mark.parametrize("template", TEMPLATES)
def test_real_conversations_have_the_masks_that_transformers_gives(shared, template):
    tokenizer = words(TEMPLATES[template])
    lines = (shared / "data" / "gsm8k" / "test.jsonl").read_text().splitlines()
    sets = [(GSM8K, [json.loads(line) for line in lines[:200]])]
    if template == "tools":
        calls = json.loads((shared / "data" / "chat" / "toolcall_en_demo.json").read_text())
        sets.append(({"type": "sharegpt"}, calls[:100]))
    for its, records in sets:
        settings = DatasetSettings(**its)
        samples = Encoder(settings, tokenizer)(records)
        assert samples.records == list(range(len(records)))
        for index, record in enumerate(records):
            said_in: Any = FORMATS.load(settings.type)(settings, record)
            ids, labels, _ = samples.sides[0][index]
            assert (ids.tolist(), labels.tolist()) == judged(
                tokenizer, said_in.messages, said_in.tools
            )


@pytest.mark.slow
@settings(deadline=None)
@given(ASKED, st.sampled_from([CHATML, HEADERS]), st.sampled_from(KINDS))
def test_without_marks_the_tokens_are_those_with_marks(messages, template, kind):
    mine = encode({"messages": messages}, words(unmarked(template), kind), type="chat")
    ids, labels = judged(words(template, kind), messages)
    if set(labels) == {-100}:
        assert mine.reason == "no_trained_tokens"
    else:
        assert mine == (ids, labels)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [CHATML, unmarked(CHATML)], ids=["marked", "unmarked"])
def test_a_token_of_the_prompt_and_the_answer_is_the_answers(template, kind):
    messages = [said("user", "u"), said("assistant", "\n4")]
    tokenizer = words(template, kind)
    ids, labels = encode({"messages": messages}, tokenizer, type="chat")
    assert (ids, labels) == judged(words(CHATML, kind), messages)
    assert ids == tokenizer.apply_chat_template(messages)["input_ids"]


def test_a_conversation_that_the_assistant_begins_is_trained_on_its_words_without_marks():
    for content in ("a", "  \n", "a<|im_end|>"):
        messages = [said("assistant", content), said("user", "u")]
        found = encode({"messages": messages}, words(unmarked(CHATML)), type="chat")
        if content.strip():
            assert found == judged(words(CHATML), messages)


def test_a_template_that_rewrites_earlier_turns_gives_a_bad_row_not_a_wrong_mask():
    forgetful = words(
        "{% for m in messages %}{{ m['role'] + ':' }}"
        "{{ m['content'] if loop.last or m['role'] == 'user' else '...' }}{% endfor %}"
    )
    chat = {"messages": [said(r, "x") for r in ("user", "assistant", "user", "assistant")]}
    assert trained(forgetful, encode({"messages": chat["messages"][:2]}, forgetful, type="chat")[1])
    for mode, why in (("auto", "shows message 2"), ("whole", "differently once others follow")):
        fault = encode(chat, forgetful, type="chat", turn_rendering=mode)
        assert fault.reason == "template"
        assert why in fault.why
    _, labels = encode(chat, forgetful, type="chat", train_on_turns="last")
    assert trained(forgetful, labels) == "assistant:x"


def test_a_conversation_that_the_template_refuses_spoils_only_itself():
    strict = words(
        "{%- if messages[0]['role'] != 'user' -%}{{ raise_exception('start with user') }}"
        "{%- endif -%}" + CHATML
    )
    chats = [
        {"messages": [said(role, "a"), said("assistant", "b")]}
        for role in ("user", "system", "user")
    ]
    samples = Encoder(DatasetSettings(type="chat"), strict)(chats)
    assert samples.records == [0, 2]
    assert "start with user" in samples.faults[1].why
    assert [trained(strict, samples.sides[0][i][1]) for i in (0, 1)] == ["b<|im_end|>"] * 2


LONG = [
    said("system", "s"),
    said("user", "one"),
    said("assistant", "first"),
    said("user", "two"),
    said("assistant", "second"),
    said("user", "more"),
    said("assistant", "third"),
]


@pytest.mark.parametrize("template", [CHATML, unmarked(CHATML)], ids=["marked", "unmarked"])
@pytest.mark.parametrize(
    ("weights", "its", "expected"),
    [
        ({}, {}, "first<|im_end|>second<|im_end|>third<|im_end|>"),
        ({2: 0}, {}, "second<|im_end|>third<|im_end|>"),
        ({4: 0}, {}, "first<|im_end|>third<|im_end|>"),
        ({6: 0}, {}, "first<|im_end|>second<|im_end|>"),
        ({2: 0, 6: 0}, {}, "second<|im_end|>"),
        ({}, {"train_on_turns": "last"}, "third<|im_end|>"),
        ({6: 0}, {"train_on_turns": "last"}, "second<|im_end|>"),
        ({4: 0}, {"mask_eos_in_loss": True}, "firstthird"),
    ],
)
def test_of_the_assistants_turns_those_that_are_wanted_are_trained(
    template, weights, its, expected
):
    messages = [
        {**message, "weight": weights[i]} if i in weights else message
        for i, message in enumerate(LONG)
    ]
    tokenizer = words(template)
    ids, labels = encode({"messages": messages}, tokenizer, type="chat", **its)
    assert trained(tokenizer, labels) == expected
    assert ids == tokenizer.apply_chat_template(LONG)["input_ids"]


def test_the_last_turn_is_all_that_is_said_after_the_last_question():
    call = {"role": "assistant", "content": "let me see"}
    messages = [*LONG[1:4], call, said("tool", "4"), said("assistant", "four")]
    tokenizer = words(CHATML)
    _, labels = encode({"messages": messages}, tokenizer, type="chat", train_on_turns="last")
    assert trained(tokenizer, labels) == "let me see<|im_end|>four<|im_end|>"


@pytest.mark.parametrize("template", [CHATML, unmarked(CHATML)], ids=["marked", "unmarked"])
def test_a_trained_prompt_reaches_up_to_the_last_trained_token(template):
    tokenizer = words(template)
    ids, labels = encode({"messages": LONG}, tokenizer, type="chat", train_on_prompt=True)
    end = len(tokenizer("\n")["input_ids"])  # what the template writes after the last turn
    assert labels == ids[:-end] + [-100] * end


@settings(deadline=None)
@given(ASKED.filter(lambda messages: messages[-1]["role"] == "assistant"))
@example([said("user", "u"), said("assistant", "\n4")])
def test_the_two_sides_of_a_pair_begin_with_the_tokens_of_one_prompt(messages):
    *prompt, answer = messages
    other = said("assistant", answer["content"] + "\n no")
    record = {"prompt": prompt, "chosen": [answer], "rejected": [other]}
    tokenizer = words(CHATML)
    found = encode(record, tokenizer, type="preference")
    if not isinstance(found, tuple):
        assert found.reason in ("empty", "bad_value")
        return
    starts = [next(i for i, x in enumerate(labels) if x != -100) for _, labels in found]
    assert starts[0] == starts[1]
    assert found[0][0][: starts[0]] == found[1][0][: starts[0]]
    for (ids, labels), last in zip(found, (answer, other), strict=True):
        whole = tokenizer.apply_chat_template([*prompt, last])["input_ids"]
        assert ids == whole
        # A token that is also of the prompt is trained with either answer.
        before = trained(tokenizer, labels).removesuffix(last["content"] + "<|im_end|>")
        assert before in ("", "\n")


def test_a_template_that_gives_the_sides_of_a_pair_different_prompts_makes_a_bad_row():
    tokenizer = words("{{ messages[-1].content | length }}: " + CHATML)
    record = {"prompt": "q", "chosen": "yes", "rejected": "no!"}
    assert isinstance(encode(record, tokenizer, type="preference"), tuple)
    fault = encode({**record, "rejected": "no"}, tokenizer, type="preference")
    assert fault.reason == "template"
    assert "other tokens before each answer" in fault.why


def test_a_template_that_writes_the_date_writes_the_same_one_every_day():
    template = "{{ 'Today: ' + strftime_now('%d %b %Y') + '\\n' }}" + CHATML
    ids, labels = encode({"messages": LONG}, words(template), type="chat")
    assert words(template).decode(ids).startswith("Today: 26 Jul 2024\n<|im_start|>")
    assert trained(words(template), labels) == "first<|im_end|>second<|im_end|>third<|im_end|>"


IDEFICS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}:"
    "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}<|im_end|>{% endfor %}"
)
"""As Idefics 3's: contents are lists of parts, and of text nothing is shown."""


@pytest.mark.parametrize("system", [[], [said("system", "s")]])
def test_conversations_that_begin_with_the_assistant_are_counted_where_the_template_shows_them(
    system,
):
    first = [*system, said("assistant", "a"), said("user", "u"), said("assistant", "b")]
    usual = [*system, said("user", "u"), said("assistant", "b")]
    tokenizer = words(CHATML)
    samples = Encoder(DatasetSettings(type="chat"), tokenizer)(
        [{"messages": messages} for messages in (first, usual, first)]
    )
    assert samples.records == [0, 1, 2]
    assert samples.counts["assistant_first"] == 2
    assert trained(tokenizer, samples.sides[0][0][1]) == "a<|im_end|>b<|im_end|>"


def test_answers_that_a_template_leaves_out_without_a_word_are_bad_rows():
    silent = (
        "{% for m in messages %}{% if not (loop.first and m['role'] == 'assistant') %}"
        "<|im_start|>{{ m['role'] }}:{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>"
        "{% endif %}{% endif %}{% endfor %}"
    )
    chat = [said("assistant", "hello"), said("user", "u"), said("assistant", "bye")]
    fault = encode({"messages": chat}, words(silent), type="chat")
    assert fault.reason == "template"
    assert "leaves out what the assistant says (message 1)" in fault.why
    kept = [{**chat[0], "weight": 0}, *chat[1:]]  # nothing of it would be trained
    assert trained(words(silent), encode({"messages": kept}, words(silent), type="chat")[1])
    fault = encode({"messages": chat[1:]}, words(IDEFICS), type="chat")
    assert "leaves out what the assistant says (message 2)" in fault.why
