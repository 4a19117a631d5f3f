"""Samples that are too long keep what the settings say, and what they lose is counted."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.encode.truncate import truncated_lengths
from penstock.prepare.settings import DatasetSettings
from penstock.rows.tokenizer import byte_tokenizer
from tests.stages.prepare.conversations import said
from tests.stages.prepare.encoding import CHATML, encode, trained, words

TOKENIZER: Any = byte_tokenizer()
PLAIN: Any = byte_tokenizer()
PLAIN.chat_template = None
MODES = ("keep_start", "keep_end", "drop", "drop_turns")
SIZES = st.integers(0, 30)


def cut(sequence, prompt, stays):
    """What is left of a sequence, in plain Python."""
    (a, b), [(c, d)] = stays.prompt, stays.answers
    return sequence[:prompt][a:b] + sequence[prompt:][c:d]


@settings(deadline=None)
@given(
    SIZES,
    SIZES,
    st.sampled_from(MODES),
    st.integers(1, 40),
    st.none() | st.integers(1, 20),
)
def test_what_is_kept_fits_and_is_what_the_mode_keeps(prompt, answer, mode, limit, most):
    its = DatasetSettings(max_seq_len=limit, truncation_mode=mode, max_prompt_len=most)
    whole = list(range(prompt + answer))
    stays = truncated_lengths(prompt, [answer], its)
    shortened = whole
    if len(whole) > limit and most is not None and prompt > most:
        asked = whole[:most] if mode == "keep_start" else whole[prompt - most : prompt]
        shortened = asked + whole[prompt:]
    if len(shortened) <= limit:
        expected = shortened
    elif mode == "drop":
        expected = None
    else:
        expected = shortened[-limit:] if mode == "keep_end" else shortened[:limit]
    assert (None if stays is None else cut(whole, prompt, stays)) == expected


@settings(deadline=None)
@given(SIZES, st.lists(SIZES, min_size=2, max_size=2), st.sampled_from(MODES), st.integers(1, 40))
def test_the_sides_of_a_pair_keep_the_same_prompt_and_fit_both(prompt, answers, mode, limit):
    its = DatasetSettings(max_seq_len=limit, truncation_mode=mode)
    stays = truncated_lengths(prompt, answers, its)
    if stays is None:
        assert mode == "drop"
        return
    first, last = stays.prompt
    for answer, (start, stop) in zip(answers, stays.answers, strict=True):
        assert last - first + stop - start <= limit
        assert 0 <= start <= stop <= answer
    if prompt + max(answers) > limit:
        longer = stays.answers[answers.index(max(answers))]
        assert last - first + longer[1] - longer[0] == limit


ABC = {"instruction": "abcdef", "output": "123456"}  # 6 + 2 + 6 + 1 tokens


@pytest.mark.parametrize(
    ("its", "ids", "is_trained", "lost"),
    [
        ({"max_seq_len": 15}, "abcdef\n\n123456<|im_end|>", "123456<|im_end|>", 0),
        ({"max_seq_len": 10}, "abcdef\n\n12", "12", 5),
        ({"max_seq_len": 10, "truncation_mode": "keep_end"}, "f\n\n123456<|im_end|>", None, 5),
        ({"max_seq_len": 10, "truncation_mode": "drop_turns"}, "abcdef\n\n12", "12", 5),
        ({"max_seq_len": 13, "max_prompt_len": 5}, "abcde123456<|im_end|>", None, 3),
        ({"max_seq_len": 10, "max_prompt_len": 5}, "abcde12345", "12345", 5),
        (
            {"max_seq_len": 13, "max_prompt_len": 5, "truncation_mode": "drop"},
            "def\n\n123456<|im_end|>",
            None,
            3,
        ),
        (
            {"max_seq_len": 10, "max_prompt_len": 5, "truncation_mode": "drop_turns"},
            "def\n\n12345",
            "12345",
            5,
        ),
    ],
)
def test_a_long_sample_loses_what_its_mode_says(its, ids, is_trained, lost):
    samples = Encoder(DatasetSettings(type="instruction", **its), PLAIN)([ABC])
    [side] = samples.sides
    assert TOKENIZER.decode(side[0][0]) == ids
    assert trained(TOKENIZER, side[0][1].tolist()) == (is_trained or "123456<|im_end|>")
    assert (samples.counts["tokens_cut"], samples.counts["truncated"]) == (lost, int(lost > 0))


def test_a_long_sample_is_left_out_where_that_is_said_or_nothing_to_train_is_left():
    fault = encode(ABC, PLAIN, type="instruction", max_seq_len=10, truncation_mode="drop")
    assert (fault.reason, fault.why) == ("too_long", "15 tokens where max_seq_len is 10")
    fault = encode(ABC, PLAIN, type="instruction", max_seq_len=8)
    assert fault.reason == "no_trained_tokens"
    assert "what is left of 15 tokens (max_seq_len 8)" in fault.why


TURNS = [
    said("system", "be brief"),
    *(said(role, f"{role} {n}") for n in range(6) for role in ("user", "assistant")),
]


@pytest.mark.parametrize("kind", ["sft", "preference"])
@settings(deadline=None)
@given(st.integers(20, 330))
def test_the_fewest_oldest_turns_are_dropped_that_make_a_conversation_fit(kind, limit):
    def whole(messages):
        return len(TOKENIZER.apply_chat_template(messages)["input_ids"])

    def without(turns):
        return [TURNS[0], *TURNS[1 + 2 * turns :]]

    its: Any = {"max_seq_len": limit, "truncation_mode": "drop_turns"}
    other = said("assistant", "no")
    if kind == "sft":
        record: Any = {"messages": TURNS}
        settings = DatasetSettings(type="chat", **its)
    else:
        record = {"prompt": TURNS[:-1], "chosen": [TURNS[-1]], "rejected": [other]}
        settings = DatasetSettings(type="preference", **its)
    turns = next((n for n in range(6) if whole(without(n)) <= limit), 5)
    samples = Encoder(settings, TOKENIZER)([record])
    if not samples.records:
        assert samples.faults[0].reason == "no_trained_tokens"
        assert turns == 5
        return
    [ids, *rest] = [side[0][0].tolist() for side in samples.sides]
    assert ids == TOKENIZER.apply_chat_template(without(turns))["input_ids"][:limit]
    assert samples.counts["turns_dropped"] == turns
    lost = whole(TURNS) - len(ids)
    for side in rest:
        shorter = [*without(turns)[:-1], other]
        assert side == TOKENIZER.apply_chat_template(shorter)["input_ids"][:limit]
        lost += whole([*TURNS[:-1], other]) - len(side)
    assert samples.counts["tokens_cut"] == lost


def test_a_conversation_of_which_turns_were_dropped_is_rendered_anew():
    tokenizer = words("{%- if messages | length > 3 %}{{ 'long: ' }}{% endif %}" + CHATML)
    its: Any = {"type": "chat", "truncation_mode": "drop_turns"}
    ids, _ = encode({"messages": TURNS}, tokenizer, **its)
    assert tokenizer.decode(ids).startswith("long: ")
    short, _ = encode({"messages": TURNS}, tokenizer, **its, max_seq_len=len(ids) // 4)
    assert tokenizer.decode(short).startswith("<|im_start|>system")


def test_given_tokens_are_cut_like_others():
    record = {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, 3, 4, 5]}
    its: Any = {"max_seq_len": 4, "truncation_mode": "keep_end"}
    assert encode(record, TOKENIZER, **its) == ([2, 3, 4, 5], [-100, 3, 4, 5])
    its = {"max_seq_len": 4, "max_prompt_len": 1}
    assert encode(record, TOKENIZER, **its) == ([1, 3, 4, 5], [-100, 3, 4, 5])
