"""Parse tool definitions and tool calls in OpenAI's format."""

from typing import Any

from penstock.prepare.bad_records import BadRecord, check_text, json_type_name
from penstock.prepare.formats.json_values import Object, check_json, check_object, parse_json_text


def parse_tools(where: str, value: Any) -> list[Object] | None:
    """Parse a list of tools, possibly as JSON text; None if there is none.

    A bare `{"name", "description", "parameters"}` becomes the `function` of a tool. Other fields
    are kept, including nulls: chat templates write tools as JSON, so the model sees nulls.
    """
    if value is None or value == "":
        return None
    found = parse_json_text(where, value)
    if not isinstance(found, list):
        raise BadRecord(
            "wrong_type", f"{where} is {json_type_name(found)} where a list of tools is meant"
        )
    return [_parse_tool(f"{where}[{index}]", entry) for index, entry in enumerate(found)] or None


def parse_tool_calls(where: str, value: Any) -> list[Object]:
    """Parse a list of tool calls, possibly as JSON text."""
    found = parse_json_text(where, value)
    if not isinstance(found, list):
        raise BadRecord(
            "wrong_type", f"{where} is {json_type_name(found)} where a list of calls is meant"
        )
    return [_parse_call(f"{where}[{index}]", entry) for index, entry in enumerate(found)]


def parse_inline_calls(where: str, value: Any) -> list[Object]:
    """Parse a message content of one tool call or a list, usually as JSON text."""
    found = parse_json_text(where, value)
    if isinstance(found, list) and found:
        return parse_tool_calls(where, found)
    return [_parse_call(where, found)]


def parse_tool_call(where: str, value: Any) -> Object:
    """Build a tool call from a function's name and arguments."""
    return {"type": "function", "function": _parse_function(where, value)}


def _parse_call(where: str, value: Any) -> Object:
    entry = check_object(where, value)
    if entry.get("function") is None:
        return parse_tool_call(where, entry)
    _require_function_type(where, entry)
    kept = {name: part for name, part in entry.items() if part is not None}
    kept["type"] = "function"
    kept["function"] = _parse_function(f"{where}.function", entry["function"])
    return kept


def _parse_function(where: str, value: Any) -> Object:
    entry = check_object(where, value)
    kept = {name: part for name, part in entry.items() if part is not None}
    kept["name"] = _parse_name(where, entry)
    kept["arguments"] = _parse_arguments(f"{where}.arguments", entry.get("arguments"))
    return kept


def _parse_arguments(where: str, value: Any) -> Object:
    if value is None or value == "":
        return {}
    return check_object(where, parse_json_text(where, value))


def _parse_tool(where: str, value: Any) -> Object:
    entry = check_object(where, parse_json_text(where, value))
    if entry.get("function") is None:
        bare = {name: part for name, part in entry.items() if name != "function"}
        return {"type": "function", "function": _parse_definition(where, bare)}
    _require_function_type(where, entry)
    function = _parse_definition(f"{where}.function", entry["function"])
    return {**entry, "type": "function", "function": function}


def _parse_definition(where: str, value: Any) -> Object:
    entry = check_object(where, value)
    kept = dict(entry)
    kept["name"] = _parse_name(where, entry)
    if isinstance(kept.get("parameters"), str):
        at = f"{where}.parameters"
        kept["parameters"] = check_object(at, parse_json_text(at, kept["parameters"]))
    return kept


def _require_function_type(where: str, entry: Object) -> None:
    said = entry.get("type")
    if said not in (None, "function"):
        raise BadRecord(
            "bad_value",
            f"{where}.type is {check_json(where, said)!r}; only 'function' is known",
        )


def _parse_name(where: str, entry: Object) -> str:
    if entry.get("name") is None:
        raise BadRecord("missing_column", f"{where} has no name; it has {', '.join(entry)}")
    return check_text(f"{where}.name", entry["name"])
