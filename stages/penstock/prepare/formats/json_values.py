"""JSON values in records: parse, validate and serialize."""

import json
import math
from typing import Any

from penstock.prepare.bad_records import BadRecord, check_text, json_type_name, wrong_type

# Maximum nesting depth, because chat templates traverse values recursively.
MAX_DEPTH = 64

Object = dict[str, Any]


Path = tuple["Path", str | int] | tuple[str]
"""A place in a value: the place of what it is in, and its name or index there. Spelled in errors
only."""


def check_json(location: str, value: Any) -> Any:
    """Return `value`, which must be JSON that can be encoded as UTF-8."""
    _check((location,), value, MAX_DEPTH)
    return value


def check_object(location: str, value: Any) -> Object:
    """Return `value`, which must be a JSON object."""
    return check_json(location, require_object(location, value))


def require_object(location: str, value: Any) -> Object:
    """Return `value`, which must be an object. Its members are not checked."""
    if isinstance(value, dict):
        return value
    raise wrong_type(location, value, "an object")


def parse_json_text(location: str, value: Any) -> Any:
    """Return `value`, parsed as JSON if it is a string."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        why = f"{location} is not JSON: {error.msg} at character {error.pos + 1}"
        if value[error.pos : error.pos + 1] == "'":
            why += "; single quotes are Python's, write it with json.dumps"
        raise BadRecord("bad_value", why) from None
    # A JSONDecodeError is a ValueError, too; a plain one is of int(), which takes 4,300 digits at
    # most.
    except (ValueError, RecursionError):
        why = f"{location} is not JSON: a number is too long or it is nested too deep"
        raise BadRecord("bad_value", why) from None


def to_json_text(location: str, value: Any) -> str:
    """Serialize `value` as compact JSON without ASCII escapes."""
    return json.dumps(check_json(location, value), ensure_ascii=False, separators=(",", ":"))


def _check(location: Path, value: Any, levels: int) -> None:
    if isinstance(value, str):
        if not value.isascii():
            check_text(_spell(location), value)
    elif isinstance(value, dict | list):
        _check_members(location, value, levels)
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise BadRecord("bad_value", f"{_spell(location)} is a number of over 64 bits")
    elif isinstance(value, float):
        # json.loads reads NaN and Infinity.
        if not math.isfinite(value):
            raise BadRecord("bad_value", f"{_spell(location)} is {value}, which JSON does not have")
    elif value is not None:
        why = f"{_spell(location)} is {json_type_name(value)}, which JSON does not have"
        raise BadRecord("wrong_type", why)


def _check_members(location: Path, value: Object | list[Any], levels: int) -> None:
    if not levels:
        raise BadRecord("bad_value", f"{_spell(location)} lies over {MAX_DEPTH} levels deep")
    if isinstance(value, list):
        for index, entry in enumerate(value):
            _check((location, index), entry, levels - 1)
        return
    for name, entry in value.items():
        if not (isinstance(name, str) and name.isascii()):
            check_text(f"a name in {_spell(location)}", name)
        _check((location, name), entry, levels - 1)


def _spell(location: Path) -> str:
    if len(location) == 1:
        return location[0]
    inside, name = location
    return _spell(inside) + (f"[{name}]" if isinstance(name, int) else f".{name}")
