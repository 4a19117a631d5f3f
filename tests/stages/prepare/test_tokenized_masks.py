"""Tokenized records with the masks of other libraries."""

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from penstock.prepare.bad_records import BadRecord
from tests.stages.prepare.conversations import parse
from tests.stages.prepare.encoding import words

IDS, LABELS = [5, 6, 7, 8, 9], [-100, 6, 7, -100, 9]


def sample(**record):
    found = parse({"input_ids": IDS, **record}, type="tokenized")
    return found.input_ids.tolist(), found.labels.tolist()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_as_transformers_writes_it_is_removed(side):
    tokenizer: PreTrainedTokenizerFast = words()
    texts = ["a", "a few more words here"]
    tokenizer.pad_token = tokenizer.eos_token
    padded = tokenizer(texts, padding=True, padding_side=side)
    for index, text in enumerate(texts):
        ids, mask = padded["input_ids"][index], padded["attention_mask"][index]
        found = parse(
            {
                "input_ids": ids,
                "labels": ids,
                "attention_mask": mask,
                "token_type_ids": [0] * len(ids),
            },
            type="tokenized",
        )
        assert found.input_ids.tolist() == tokenizer(text)["input_ids"]
        assert found.labels.tolist() == found.input_ids.tolist()


@pytest.mark.parametrize(
    ("masks", "labels"),
    [
        ({"completion_mask": [0, 0, 1, 1, 1]}, [-100, -100, 7, 8, 9]),
        ({"assistant_masks": [0, 1, 0, 1, 1]}, [-100, 6, -100, 8, 9]),
        ({"loss_mask": [False, True, False, True, True]}, [-100, 6, -100, 8, 9]),
        ({"loss_mask": np.array([0, 1, 0, 1, 1])}, [-100, 6, -100, 8, 9]),
        ({"prompt_mask": [1, 1, 0, 0, 0]}, [-100, -100, 7, 8, 9]),
        (
            {"completion_mask": [0, 0, 1, 1, 1], "assistant_masks": [1, 1, 0, 1, 1]},
            [-100, -100, -100, 8, 9],
        ),
        ({"labels": LABELS, "completion_mask": [0, 0, 1, 1, 1]}, [-100, -100, 7, -100, 9]),
        ({"labels": LABELS, "attention_mask": None, "position_ids": [3, 4, 5, 6, 7]}, LABELS),
    ],
    ids=str,
)
def test_a_token_is_trained_if_all_masks_say_so(masks, labels):
    assert sample(**masks) == (IDS, labels)
    ids, cut = sample(**masks | {"attention_mask": [0, 1, 1, 1, 0]})
    assert (ids, cut) == (IDS[1:4], labels[1:4])


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({}, "no column 'labels'"),
        ({"labels": LABELS, "attention_mask": [1]}, "input_ids has 5 entries and attention_mask 1"),
        ({"labels": LABELS, "attention_mask": [1, 1, 0, 1, 1]}, r"mask\[2\] is 0 between ones"),
        ({"labels": LABELS, "attention_mask": [1, 1, 2, 2, 2]}, r"mask\[2\] is 2 where 0 or 1"),
        ({"completion_mask": "x"}, "input_ids has 5 entries and completion_mask a string"),
        ({"completion_mask": [0, 0, 0.5, 1, 1]}, r"completion_mask\[2\] is 0.5 where 0 or 1"),
        ({"completion_mask": [0, 0, "1", 1, 1]}, r"completion_mask\[2\] is a string where"),
        ({"labels": LABELS, "position_ids": [0, 1, 0, 1, 2]}, r"\[2\] is 0 after 1, so it is sev"),
        ({"labels": LABELS, "position_ids": [0, 1]}, "5 entries and position_ids 2"),
        ({"labels": LABELS, "token_type_ids": [0, 0, 1, 1, 1]}, "than 0, which are not read; data"),
    ],
)
def test_masks_that_do_not_fit_are_refused_by_name(columns, why):
    with pytest.raises(BadRecord, match=why):
        sample(**columns)


def test_a_record_that_is_padding_alone_is_empty():
    assert sample(labels=LABELS, attention_mask=[0] * 5) == ([], [])
