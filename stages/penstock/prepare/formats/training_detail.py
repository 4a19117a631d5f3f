"""Which characters of a message are trained (`field_message_training_detail`), as in axolotl.

A list of `{"begin_offset": …, "end_offset": …, "train": …}`, in characters, the end inclusive.
Characters in no entry are not trained.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from penstock.prepare.bad_records import BadRecord, check_list, describe_value, wrong_type
from penstock.prepare.formats.json_values import parse_json_text
from penstock.prepare.formats.training_flags import Flag, parse_flag

Ranges = tuple[tuple[int, int], ...]
"""[start, stop) in characters of a message's content; sorted and disjoint."""

BEGIN, END, TRAIN = "begin_offset", "end_offset", "train"
MEANT = f"{BEGIN}, {END} and {TRAIN}"


def trained_ranges(
    location: str, value: Any, content: Any, weight: float, *, is_flagged: bool, is_role: bool
) -> tuple[float, Ranges | None]:
    """(loss weight, trained ranges; None: all) of a message with `content` and this `value`.

    `weight`: as the message's flags say, of which it has some if `is_flagged`; `is_role`: whether
    its role is trained. An empty list excludes the message, unless a flag trains it; a list without
    a trained entry leaves the end of its turn, as in axolotl. Raises BadRecord.
    """
    meant = f"a list of entries with {MEANT}"
    entries = check_list(location, parse_json_text(location, value), meant)
    if not entries:
        return (weight if is_flagged else 0.0), None
    if not isinstance(content, str) or not content.strip():
        reason = "blank" if isinstance(content, str) else "not text"
        why = f"{location} is about characters of a content that is {reason}; leave it out"
        raise BadRecord("bad_value", why)
    ranges = _parse_entries(location, entries, len(content))
    if ranges and not weight:
        why = "a key beside it excludes the message" if is_role else "roles_to_train lacks its role"
        raise BadRecord("bad_value", f"{location} trains characters, but {why}")
    return weight, ranges


def _parse_entries(location: str, entries: Sequence[Any], length: int) -> Ranges:
    entries_by_start: list[tuple[int, int, bool, int]] = []
    for index, entry in enumerate(entries):
        path = f"{location}[{index}]"
        if not isinstance(entry, dict):
            raise wrong_type(path, entry, f"an object with {MEANT}")
        begin, end = (_parse_offset(path, entry, name) for name in (BEGIN, END))
        if not begin <= end < length:
            raise BadRecord(
                "bad_value",
                f"{path} is from {begin} to {end}, which the content of {length} characters does "
                f"not have; offsets count from 0, and {END} is the last character",
            )
        if entry.get(TRAIN) is None:
            raise BadRecord("missing_column", f"{path} has no {TRAIN}")
        trains = parse_flag(f"{path}.{TRAIN}", entry[TRAIN], Flag()) > 0
        if unknown := [n for n in entry if n not in (BEGIN, END, TRAIN) and entry[n] is not None]:
            raise BadRecord("bad_value", f"{path} has {', '.join(unknown)}; it may have {MEANT}")
        entries_by_start.append((begin, end + 1, trains, index))
    entries_by_start.sort()
    for (_, stop, _, number), (start, _, _, next_number) in pairwise(entries_by_start):
        if start < stop:
            why = f"{location}[{number}] and [{next_number}] overlap at {start}"
            raise BadRecord("bad_value", why)
    joined: list[tuple[int, int]] = []
    for start, stop, trains, _ in entries_by_start:
        if trains and joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        elif trains:
            joined.append((start, stop))
    return tuple(joined)


def _parse_offset(location: str, entry: Mapping[str, Any], name: str) -> int:
    value: Any = entry.get(name)
    # Columnar files and data frames with nulls hold whole numbers as floats.
    is_whole = isinstance(value, float) and value.is_integer()
    if isinstance(value, bool) or not (isinstance(value, int) or is_whole):
        if value is None:
            raise BadRecord("missing_column", f"{location} has no {name}")
        why = f"{location}.{name} is {describe_value(value)}, not a whole number"
        raise BadRecord("wrong_type", why)
    if value < 0:
        raise BadRecord("bad_value", f"{location}.{name} is {value}; offsets count from 0")
    return int(value)
