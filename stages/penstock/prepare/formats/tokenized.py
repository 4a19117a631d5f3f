"""`tokenized`: records with `input_ids` and unshifted `labels`, and masks as TRL and transformers
write them, or a loss weight of each token.

Padding is removed, so that a sample is what its `attention_mask` has: no model attends to the rest.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.config.schema.dataset import LOSS_WEIGHT_LIMITS
from penstock.prepare.bad_records import (
    BadRecord,
    check_list,
    check_weight,
    get_column,
    json_type_name,
)
from penstock.prepare.formats.conversation import Record, TokenizedSample, Tokens
from penstock.prepare.settings import DatasetSettings
from penstock.rows.schema import IGNORED, LOSS_WEIGHTS

_INT32 = np.iinfo(np.int32)

NUMBERS = {int, float, np.float32, np.float64}
"""Types of loss weights."""

LOSS_MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")
"""Columns with 1 for tokens that are trained; a token is trained if all of them say so."""

PROMPT_MASK = "prompt_mask"
"""Column with 0 for tokens that are trained."""


def tokenized(_: DatasetSettings, record: Record) -> TokenizedSample:
    """Parse the columns. The encoder checks that token ids are in the vocabulary."""
    ids = _parse_ids(record, "input_ids")
    masks = {
        name: _parse_mask(record, name, len(ids))
        for name in (*LOSS_MASKS, PROMPT_MASK)
        if record.get(name) is not None
    }
    weights = _parse_weights(record, len(ids))
    selects = masks or weights is not None
    labels = ids if selects and record.get("labels") is None else _parse_ids(record, "labels")
    if len(ids) != len(labels):
        raise BadRecord("bad_value", f"input_ids has {len(ids)} entries and labels {len(labels)}")
    for name, mask in masks.items():
        labels = np.where(mask == (name != PROMPT_MASK), labels, np.int32(IGNORED))
    if weights is not None:
        labels = np.where(weights > 0, labels, np.int32(IGNORED))
    start, stop = _attended(record, len(ids))
    if record.get("position_ids") is not None:
        _check_positions(_parse_ids(record, "position_ids"), len(ids), start, stop)
    if record.get("token_type_ids") is not None and _parse_ids(record, "token_type_ids").any():
        why = "token_type_ids has other numbers than 0, which are not read"
        raise BadRecord("bad_value", f"{why}; {WITHOUT_COLUMN}")
    is_plain = weights is None or bool((weights[labels != IGNORED] == 1).all())
    return TokenizedSample(
        ids[start:stop],
        labels[start:stop],
        None if is_plain or weights is None else weights[start:stop],
    )


WITHOUT_COLUMN = "data.select_columns: [input_ids, labels] leaves the column out"


def _attended(record: Record, count: int) -> tuple[int, int]:
    name = "attention_mask"
    if record.get(name) is None:
        return 0, count
    ones = np.flatnonzero(_parse_mask(record, name, count))
    if not len(ones):
        return 0, 0
    start, stop = int(ones[0]), int(ones[-1]) + 1
    if stop - start > len(ones):
        gap = start + int(np.flatnonzero(np.diff(ones) > 1)[0]) + 1
        why = f"{name}[{gap}] is 0 between ones; only padding at the ends can be left out"
        raise BadRecord("bad_value", why)
    return start, stop


def _check_positions(positions: Tokens, count: int, start: int, stop: int) -> None:
    """Raise BadRecord for other positions than those of one sample."""
    _require_length("position_ids", positions, count)
    steps = np.flatnonzero(np.diff(positions[start:stop]) != 1)
    if len(steps):
        position = start + int(steps[0]) + 1
        raise BadRecord(
            "bad_value",
            f"position_ids[{position}] is {positions[position]} after {positions[position - 1]}, "
            f"so it is several samples; write one to a record, or, if it is one, {WITHOUT_COLUMN}",
        )


def _require_length(name: str, value: Any, count: int) -> None:
    size = len(value) if isinstance(value, list | np.ndarray) else json_type_name(value)
    if size != count:
        raise BadRecord("bad_value", f"input_ids has {count} entries and {name} {size}")


def _parse_mask(record: Record, name: str, count: int) -> npt.NDArray[np.bool_]:
    value = record[name]
    _require_length(name, value, count)
    entries = list(value)
    # list.count compares without a step of Python for each token; True and 1.0 count as 1.
    if entries.count(0) + entries.count(1) < count:
        index, entry = next((i, e) for i, e in enumerate(entries) if e not in (0, 1))
        text = entry if isinstance(entry, int | float) else json_type_name(entry)
        raise BadRecord("bad_value", f"{name}[{index}] is {text} where 0 or 1 is meant")
    return np.array(value, dtype=np.bool_)


def _parse_weights(record: Record, count: int) -> npt.NDArray[np.float32] | None:
    """The loss weight of each token; None without a column of them."""
    name = LOSS_WEIGHTS.name
    value = record.get(name)
    if value is None:
        return None
    _require_length(name, value, count)
    smallest, largest = LOSS_WEIGHT_LIMITS
    try:
        array = np.array(value if {*map(type, value)} <= NUMBERS else [], dtype=np.float64)
    except OverflowError:  # a whole number may have any number of digits
        array = np.empty(0)
    usable = ((array == 0) | (array >= smallest)) & (array <= largest)
    if len(array) < count or not usable.all():
        for index, entry in enumerate(value):
            check_weight(f"{name}[{index}]", entry)
    return array.astype(np.float32)


def _parse_ids(record: Mapping[str, Any], name: str) -> Tokens:
    value = get_column(record, name)
    if isinstance(value, np.ndarray):  # of the Megatron reader, whose numbers are whole
        bounds = (value.min(), value.max()) if len(value) else (0, 0)
    else:
        check_list(name, value, "a list of numbers")
        # By type: a bool is an instance of int.
        if set(map(type, value)) - {int}:
            index, entry = next((i, e) for i, e in enumerate(value) if type(e) is not int)
            why = f"{name}[{index}] is {json_type_name(entry)}, not a whole number"
            raise BadRecord("wrong_type", why)
        bounds = (min(value), max(value)) if value else (0, 0)
    if not (_INT32.min <= bounds[0] and bounds[1] <= _INT32.max):
        raise BadRecord("bad_value", f"{name} holds a number of over 32 bits")
    return np.array(value, dtype=np.int32)
