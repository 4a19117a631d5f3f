"""Parse tool definitions and tool calls in OpenAI's format."""

from collections.abc import Iterator
from typing import Any

from penstock.prepare.bad_records import BadRecord, check_list, check_text, wrong_type
from penstock.prepare.formats.json_values import (
    Object,
    check_json,
    check_object,
    parse_json_text,
    require_object,
)

TOOL_LISTS = ("functions", "tools", "function_declarations", "functionDeclarations")
"""Members of an object that hold a list of tools."""

# Names of `parameters` in Anthropic's API and in the Model Context Protocol.
PARAMETERS = ("input_schema", "inputSchema")


def parse_tools(location: str, value: Any) -> list[Object] | None:
    """Parse a list of tools, a tool, or an object with such a list, possibly as JSON text; None if
    there is none.

    A bare `{"name", "description", "parameters"}` becomes the `function` of a tool. Other fields
    are kept, including nulls: chat templates write tools as JSON, so the model sees nulls.
    """
    if value is None or value == "":
        return None
    return list(_iter_tools(location, value)) or None


def _iter_tools(location: str, value: Any) -> Iterator[Object]:
    value = parse_json_text(location, value)
    if isinstance(value, list):
        for index, entry in enumerate(value):
            path = f"{location}[{index}]"
            yield from _iter_tools(path, check_object(path, parse_json_text(path, entry)))
        return
    if not isinstance(value, dict):
        raise wrong_type(location, value, "a list of tools")
    lists = [name for name in TOOL_LISTS if isinstance(value.get(name), list)]
    if not lists:
        yield _parse_tool(location, value)
    elif len(value) > 1:
        others = ", ".join(name for name in value if name != lists[0])
        raise BadRecord("bad_value", f"{location} has {lists[0]} beside {others}")
    else:
        yield from _iter_tools(f"{location}.{lists[0]}", value[lists[0]])


def parse_tool_calls(location: str, value: Any) -> list[Object]:
    """Parse a list of tool calls, possibly as JSON text."""
    calls = check_list(location, parse_json_text(location, value), "a list of calls")
    return [_parse_call(f"{location}[{index}]", entry) for index, entry in enumerate(calls)]


def parse_inline_calls(location: str, value: Any) -> list[Object]:
    """Parse a message content of one tool call or a list, usually as JSON text."""
    calls = parse_json_text(location, value)
    if isinstance(calls, list) and calls:
        return parse_tool_calls(location, calls)
    return [_parse_call(location, calls)]


def parse_tool_call(location: str, value: Any) -> Object:
    """Build a tool call from a function's name and arguments."""
    return {
        "type": "function",
        "function": _parse_function(location, check_object(location, value)),
    }


def _parse_call(location: str, value: Any) -> Object:
    entry = check_object(location, value)
    if entry.get("function") is None:
        return {"type": "function", "function": _parse_function(location, entry)}
    _require_function_type(location, entry)
    fields = {name: part for name, part in entry.items() if part is not None}
    fields["type"] = "function"
    fields["function"] = _parse_function(f"{location}.function", entry["function"])
    return fields


def _parse_function(location: str, value: Any) -> Object:
    """The function of a call, from JSON that is checked."""
    entry = require_object(location, value)
    fields = {name: part for name, part in entry.items() if part is not None}
    fields["name"] = _parse_name(location, entry)
    path, arguments = f"{location}.arguments", entry.get("arguments")
    if arguments is None or arguments == "":
        fields["arguments"] = {}
    elif isinstance(arguments, str):
        fields["arguments"] = check_object(path, parse_json_text(path, arguments))
    else:
        fields["arguments"] = require_object(path, arguments)
    return fields


def _parse_tool(location: str, value: Any) -> Object:
    entry = check_object(location, value)
    if entry.get("function") is None:
        bare = {name: part for name, part in entry.items() if name != "function"}
        return {"type": "function", "function": _parse_definition(location, bare)}
    _require_function_type(location, entry)
    function = _parse_definition(f"{location}.function", entry["function"])
    return {**entry, "type": "function", "function": function}


def _parse_definition(location: str, value: Any) -> Object:
    entry = require_object(location, value)
    schemas = [name for name in ("parameters", *PARAMETERS) if entry.get(name) is not None]
    if len(schemas) > 1:
        raise BadRecord("bad_value", f"{location} has both {schemas[0]} and {schemas[1]}")
    fields = {"parameters" if name in schemas else name: part for name, part in entry.items()}
    fields["name"] = _parse_name(location, entry)
    if isinstance(fields.get("parameters"), str):
        path = f"{location}.parameters"
        fields["parameters"] = check_object(path, parse_json_text(path, fields["parameters"]))
    return fields


def _require_function_type(location: str, entry: Object) -> None:
    written_type = entry.get("type")
    if written_type not in (None, "function"):
        raise BadRecord(
            "bad_value",
            f"{location}.type is {check_json(location, written_type)!r}; only 'function' is known",
        )


def _parse_name(location: str, entry: Object) -> str:
    if entry.get("name") is None:
        raise BadRecord("missing_column", f"{location} has no name; it has {', '.join(entry)}")
    return check_text(f"{location}.name", entry["name"])
