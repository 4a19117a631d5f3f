"""JSON values inside records: read from text, checked, and written as text."""

import json
import math
from typing import Any

from penstock.prepare.bad_records import BadRow, checked_text, json_type_name

DEEPEST = 64
"""Levels of lists and objects in one another; templates that walk a value recurse as deep."""

Object = dict[str, Any]


def checked_json(where: str, value: Any) -> Any:
    """`value`, found at `where`, which must be JSON that UTF-8 can hold."""
    _check(where, value, DEEPEST)
    return value


def checked_object(where: str, value: Any) -> Object:
    """`value`, found at `where`, which must be an object of JSON."""
    if isinstance(value, dict):
        return checked_json(where, value)
    raise BadRow("wrong_type", f"{where} is {json_type_name(value)} where an object is meant")


def unpacked(where: str, value: Any) -> Any:
    """`value`, or what it means where it is JSON as text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        why = f"{where} is not JSON: {error.msg} at character {error.pos + 1}"
        raise BadRow("bad_value", why) from None
    except (ValueError, RecursionError):
        why = f"{where} is not JSON: a number is too long or it is nested too deep"
        raise BadRow("bad_value", why) from None


def as_text(where: str, value: Any) -> str:
    """`value` as JSON on one line without spaces, its characters as they are."""
    return json.dumps(checked_json(where, value), ensure_ascii=False, separators=(",", ":"))


def _check(where: str, value: Any, levels: int) -> None:
    if isinstance(value, str):
        checked_text(where, value)
    elif isinstance(value, dict | list):
        _check_within(where, value, levels)
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise BadRow("bad_value", f"{where} is a number of over 64 bits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise BadRow("bad_value", f"{where} is {value}, which JSON does not have")
    elif value is not None:
        raise BadRow("wrong_type", f"{where} is {json_type_name(value)}, which JSON does not have")


def _check_within(where: str, value: Object | list[Any], levels: int) -> None:
    if not levels:
        raise BadRow("bad_value", f"{where} lies over {DEEPEST} levels deep")
    if isinstance(value, list):
        for index, entry in enumerate(value):
            _check(f"{where}[{index}]", entry, levels - 1)
        return
    for name, entry in value.items():
        checked_text(f"a name in {where}", name)
        _check(f"{where}.{name}", entry, levels - 1)
