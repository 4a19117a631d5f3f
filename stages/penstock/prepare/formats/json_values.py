"""JSON values in records: parse, validate and serialize."""

import json
import math
from typing import Any

from penstock.prepare.bad_records import BadRecord, check_text, json_type_name

MAX_DEPTH = 64
"""Maximum nesting depth, because chat templates traverse values recursively."""

Object = dict[str, Any]


def check_json(where: str, value: Any) -> Any:
    """Return `value`, which must be JSON that can be encoded as UTF-8."""
    _check(where, value, MAX_DEPTH)
    return value


def check_object(where: str, value: Any) -> Object:
    """Return `value`, which must be a JSON object."""
    if isinstance(value, dict):
        return check_json(where, value)
    raise BadRecord("wrong_type", f"{where} is {json_type_name(value)} where an object is meant")


def parse_json_text(where: str, value: Any) -> Any:
    """Return `value`, parsed as JSON if it is a string."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        why = f"{where} is not JSON: {error.msg} at character {error.pos + 1}"
        if value[error.pos : error.pos + 1] == "'":
            why += "; single quotes are Python's, write it with json.dumps"
        raise BadRecord("bad_value", why) from None
    except (ValueError, RecursionError):
        why = f"{where} is not JSON: a number is too long or it is nested too deep"
        raise BadRecord("bad_value", why) from None


def to_json_text(where: str, value: Any) -> str:
    """Serialize `value` as compact JSON without ASCII escapes."""
    return json.dumps(check_json(where, value), ensure_ascii=False, separators=(",", ":"))


def _check(where: str, value: Any, levels: int) -> None:
    if isinstance(value, str):
        check_text(where, value)
    elif isinstance(value, dict | list):
        _check_members(where, value, levels)
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise BadRecord("bad_value", f"{where} is a number of over 64 bits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise BadRecord("bad_value", f"{where} is {value}, which JSON does not have")
    elif value is not None:
        raise BadRecord(
            "wrong_type", f"{where} is {json_type_name(value)}, which JSON does not have"
        )


def _check_members(where: str, value: Object | list[Any], levels: int) -> None:
    if not levels:
        raise BadRecord("bad_value", f"{where} lies over {MAX_DEPTH} levels deep")
    if isinstance(value, list):
        for index, entry in enumerate(value):
            _check(f"{where}[{index}]", entry, levels - 1)
        return
    for name, entry in value.items():
        check_text(f"a name in {where}", name)
        _check(f"{where}.{name}", entry, levels - 1)
