"""JSON values in records: parse, validate and serialize."""

import json
import math
from typing import Any

from penstock.prepare.bad_records import BadRecord, check_text, json_type_name

MAX_DEPTH = 64
"""Maximum nesting depth, because chat templates traverse values recursively."""

Object = dict[str, Any]


Path = tuple["Path", str | int] | tuple[str]
"""A place in a value: the place of what it is in, and its name or index there. Spelled in errors
only."""


def check_json(where: str, value: Any) -> Any:
    """Return `value`, which must be JSON that can be encoded as UTF-8."""
    _check((where,), value, MAX_DEPTH)
    return value


def check_object(where: str, value: Any) -> Object:
    """Return `value`, which must be a JSON object."""
    return check_json(where, require_object(where, value))


def require_object(where: str, value: Any) -> Object:
    """Return `value`, which must be an object. Its members are not checked."""
    if isinstance(value, dict):
        return value
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


def _check(where: Path, value: Any, levels: int) -> None:
    if isinstance(value, str):
        if not value.isascii():
            check_text(_spell(where), value)
    elif isinstance(value, dict | list):
        _check_members(where, value, levels)
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise BadRecord("bad_value", f"{_spell(where)} is a number of over 64 bits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise BadRecord("bad_value", f"{_spell(where)} is {value}, which JSON does not have")
    elif value is not None:
        raise BadRecord(
            "wrong_type", f"{_spell(where)} is {json_type_name(value)}, which JSON does not have"
        )


def _check_members(where: Path, value: Object | list[Any], levels: int) -> None:
    if not levels:
        raise BadRecord("bad_value", f"{_spell(where)} lies over {MAX_DEPTH} levels deep")
    if isinstance(value, list):
        for index, entry in enumerate(value):
            _check((where, index), entry, levels - 1)
        return
    for name, entry in value.items():
        if not (isinstance(name, str) and name.isascii()):
            check_text(f"a name in {_spell(where)}", name)
        _check((where, name), entry, levels - 1)


def _spell(where: Path) -> str:
    if len(where) == 1:
        return where[0]
    inside, name = where
    return _spell(inside) + (f"[{name}]" if isinstance(name, int) else f".{name}")
