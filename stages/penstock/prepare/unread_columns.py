"""Find non-empty columns with well-known names that the data set's format does not read."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.prepare.settings import DatasetSettings

WATCHED = (
    "input",
    "context",
    "system",
    "system_prompt",
    "history",
    "reasoning",
    "reasoning_content",
    "thinking",
    "tools",
    "functions",
    "tool_calls",
)
"""Column names that public data sets use for parts of a prompt or an answer."""

ALPACA_COLUMNS = ("input", "system", "history")

DEFAULT_COLUMNS: Mapping[str, Sequence[str]] = {
    "sharegpt": ("system",),
    "alpaca": ALPACA_COLUMNS,
    "sft_turns": ("system",),
    "preference": ALPACA_COLUMNS,
    "preference_turns": ("system",),
}
"""Columns that a format reads without a `field_` setting."""

TYPES_WITH_TOOLS = ("chat", "sharegpt", "alpaca", "preference", "kto")
SINGLE_COLUMN_TYPES = ("tokenized", "text")
"""Formats of one column: other columns are not part of a conversation."""


def watched_columns(its: DatasetSettings, columns: Sequence[str] | None) -> tuple[str, ...]:
    """The `WATCHED` columns that this data set does not read; with `select_columns` (`columns`),
    only those of them."""
    if its.type in SINGLE_COLUMN_TYPES:
        return ()
    named = {
        value
        for name, value in its.model_dump().items()
        if name.startswith("field_") and not name.startswith("field_message_")
    }
    read = {*DEFAULT_COLUMNS.get(its.type, ()), *named}
    if its.type not in TYPES_WITH_TOOLS:
        read -= {its.field_tools}
    return tuple(name for name in WATCHED if name not in read and (not columns or name in columns))


def count_unread(values: Iterable[Any], watched: Sequence[str]) -> Counter[str]:
    """Number of records with a non-empty value in each watched column."""
    found: Counter[str] = Counter()
    for value in values:
        if isinstance(value, Mapping):
            found.update(name for name in watched if value.get(name) not in (None, "", [], {}))
    return found


def column_remedy(name: str, type_name: str) -> str:
    """Suggestion how to have a column read."""
    if type_name == "instruction" and name in ALPACA_COLUMNS:
        return "write type: alpaca, which reads it"
    if name in ("input", "context") and type_name in ("instruction", "alpaca"):
        return f"write field_input: {name}"
    if name in ("system", "system_prompt"):
        return f"write field_system: {name}"
    if name in ("tools", "functions") and type_name in TYPES_WITH_TOOLS:
        return f"write field_tools: {name}"
    if name in ("tools", "functions", "tool_calls"):
        return "write type: chat, with messages that call tools"
    if name in ("reasoning", "reasoning_content", "thinking"):
        return "put it into the answer, or into reasoning_content of a message of type: chat"
    return "put it into a column that is read"
