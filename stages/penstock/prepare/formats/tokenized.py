"""`tokenized`: records with `input_ids` and unshifted `labels`."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.prepare.bad_records import BadRecord, get_column, json_type_name
from penstock.prepare.formats.conversation import Record, TokenizedSample, Tokens
from penstock.prepare.settings import DatasetSettings

_INT32 = np.iinfo(np.int32)


def tokenized(_: DatasetSettings, record: Record) -> TokenizedSample:
    """Parse both columns. The encoder checks that token ids are in the vocabulary."""
    ids, labels = _parse_ids(record, "input_ids"), _parse_ids(record, "labels")
    if len(ids) != len(labels):
        raise BadRecord("bad_value", f"input_ids has {len(ids)} entries and labels {len(labels)}")
    return TokenizedSample(ids, labels)


def _parse_ids(record: Mapping[str, Any], name: str) -> Tokens:
    value = get_column(record, name)
    if isinstance(value, np.ndarray):
        return _check_array(name, value)
    if not isinstance(value, list):
        raise BadRecord(
            "wrong_type", f"{name} is {json_type_name(value)} where a list of numbers is meant"
        )
    if set(map(type, value)) - {int}:
        index, entry = next((i, e) for i, e in enumerate(value) if type(e) is not int)
        raise BadRecord(
            "wrong_type", f"{name}[{index}] is {json_type_name(entry)}, not a whole number"
        )
    if value and not (_INT32.min <= min(value) and max(value) <= _INT32.max):
        raise BadRecord("bad_value", f"{name} holds a number of over 32 bits")
    return np.array(value, dtype=np.int32)


def _check_array(name: str, value: npt.NDArray[np.integer]) -> Tokens:
    """Check an array of token ids, as the Megatron reader returns."""
    if len(value) and not (_INT32.min <= value.min() and value.max() <= _INT32.max):
        raise BadRecord("bad_value", f"{name} holds a number of over 32 bits")
    return value.astype(np.int32)
