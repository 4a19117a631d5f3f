"""`tokenized`: records that hold `input_ids` and unshifted `labels` already."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.prepare.bad_records import BadRow, column, json_type_name
from penstock.prepare.formats.sample import Ids, Record, Tokens
from penstock.prepare.settings import DatasetSettings

_LARGEST = np.iinfo(np.int32)


def tokenized(_: DatasetSettings, record: Record) -> Ids:
    """The two columns as they are. That the vocabulary holds them is checked where it is known."""
    ids, labels = _integers(record, "input_ids"), _integers(record, "labels")
    if len(ids) != len(labels):
        raise BadRow("bad_value", f"input_ids has {len(ids)} entries and labels {len(labels)}")
    return Ids(ids, labels)


def _integers(record: Mapping[str, Any], name: str) -> Tokens:
    value = column(record, name)
    if isinstance(value, np.ndarray):
        return _checked(name, value)
    if not isinstance(value, list):
        raise BadRow(
            "wrong_type", f"{name} is {json_type_name(value)} where a list of numbers is meant"
        )
    if set(map(type, value)) - {int}:
        index, entry = next((i, e) for i, e in enumerate(value) if type(e) is not int)
        raise BadRow(
            "wrong_type", f"{name}[{index}] is {json_type_name(entry)}, not a whole number"
        )
    if value and not (_LARGEST.min <= min(value) and max(value) <= _LARGEST.max):
        raise BadRow("bad_value", f"{name} holds a number of over 32 bits")
    return np.array(value, dtype=np.int32)


def _checked(name: str, value: npt.NDArray[np.integer]) -> Tokens:
    """Ids as a file holds them in one piece."""
    if len(value) and not (_LARGEST.min <= value.min() and value.max() <= _LARGEST.max):
        raise BadRow("bad_value", f"{name} holds a number of over 32 bits")
    return value.astype(np.int32)
