"""`tokenized`: records that hold `input_ids` and unshifted `labels` already."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from penstock.prepare.faults import BadRow, column, kind_of
from penstock.prepare.formats.sample import Encoder, Record, Sample, each
from penstock.prepare.settings import DatasetSettings
from penstock.rows.schema import IGNORED

Integers = npt.NDArray[np.int64]


def tokenized(_: DatasetSettings, tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """Check the columns and take them as they are."""
    vocabulary = len(tokenizer)

    def encode(record: Record) -> Sample:
        ids = _integers(record, "input_ids")
        labels = _integers(record, "labels")
        if len(ids) != len(labels):
            why = f"input_ids has {len(ids)} entries and labels {len(labels)}"
            raise BadRow("bad_value", why)
        _in_vocabulary("input_ids", ids, vocabulary)
        _in_vocabulary("labels", labels[labels != IGNORED], vocabulary)
        return Sample(ids.astype(np.int32), labels.astype(np.int32))

    def encode_all(records: Sequence[Record]) -> list[Sample | BadRow]:
        return each(encode, records)

    return encode_all


def _integers(record: Mapping[str, Any], name: str) -> Integers:
    value = column(record, name)
    if not isinstance(value, list):
        raise BadRow("wrong_type", f"{name} is {kind_of(value)} where a list of numbers is meant")
    for index, entry in enumerate(value):
        if type(entry) is not int:
            raise BadRow("wrong_type", f"{name}[{index}] is {kind_of(entry)}, not a whole number")
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError:
        raise BadRow("bad_value", f"{name} holds a number of over 64 bits") from None


def _in_vocabulary(name: str, ids: Integers, vocabulary: int) -> None:
    outside = ids[(ids < 0) | (ids >= vocabulary)]
    if len(outside):
        why = f"{name} holds {outside[0]}; the vocabulary has tokens 0 to {vocabulary - 1}"
        raise BadRow("bad_value", why)
