"""Find what records hold and nothing reads: columns with well-known names that the data set's
format does not read, and keys of messages that the chat template does not read."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from penstock.core.process.allowed_env import is_secret
from penstock.prepare.bad_records import describe_value, record_location
from penstock.prepare.formats.conversation import REASONING, Message
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

WEIGHT_COLUMNS = ("weight", "loss_weight", "sample_weight")
"""Column names that public data sets use for the weight of a record."""

ALPACA_COLUMNS = ("input", "system", "history")
TEXT_PROMPT_COLUMNS = ("input", "history")
"""Columns that preference data and KTO read beside a prompt that is text."""

# Keys of messages that are read, or refused, apart from the template; `tool_call_id` says no more
# than the order of messages.
MESSAGE_KEYS = frozenset(("role", "content", "tool_calls", "tool_call_id", *REASONING))

# The usual column of tools, and its older name, which is read in records without the former.
TOOLS, FUNCTIONS = "tools", "functions"

IN_MESSAGES = "messages[]."
"""Prefix of keys of messages among the names of columns."""

DEFAULT_COLUMNS: Mapping[str, Sequence[str]] = {
    "sharegpt": ("system",),
    "alpaca": ALPACA_COLUMNS,
    "sft_turns": ("system",),
    "preference": ALPACA_COLUMNS,
    "kto": ALPACA_COLUMNS,
    "preference_turns": ("system",),
}
"""Columns that a format reads without a `field_` setting."""

TYPES_WITH_TOOLS = ("chat", "sharegpt", "alpaca", "preference", "kto")
PAIRS = ("preference", "kto")
# Formats of one column: other columns are not part of a conversation.
SINGLE_COLUMN_TYPES = ("tokenized", "text")


EXCERPT = 40
"""Maximum characters of a value in messages."""
# May be a secret, or a path or URL with one.
LONG_WORD = re.compile(r"[!-~]{20,}")


@dataclass
class Unread:
    """What records of a batch hold and nothing reads."""

    counts: Counter[str] = field(default_factory=Counter[str])
    """Number of records with a column or key."""
    examples: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    """(index of its first record in the batch, excerpt of the value)."""

    def add(self, record_index: int, values: Mapping[str, Any]) -> None:
        """Count the columns or keys of a record, given their values."""
        self.counts.update(values.keys())
        for name, value in values.items():
            self.examples.setdefault(name, (record_index, excerpt(name, value)))


def excerpt(name: str, value: Any) -> str:
    """The beginning of a value in one line, without what may be a secret."""
    if is_secret(name.rpartition(".")[2]):
        return "not shown"
    if isinstance(value, dict):
        keys = " ".join(LONG_WORD.sub("…", str(key)) for key in value)
        text = f"an object with {keys}"
    elif isinstance(value, str):
        # Of a long text only the beginning is searched, as only that is shown.
        text = LONG_WORD.sub(lambda match: match[0][:4] + "…", value[: 10 * EXCERPT])
        # JSON can have halves of surrogate pairs, which neither a terminal nor a file in UTF-8
        # takes.
        text = repr(" ".join(text.encode(errors="backslashreplace").decode().split()))
    else:
        text = describe_value(value)
    return text if len(text) <= EXCERPT else text[: EXCERPT - 1] + "…"


def watched_columns(settings: DatasetSettings, columns: Sequence[str] | None) -> tuple[str, ...]:
    """The columns with well-known names that this data set does not read; with `select_columns`
    (`columns`), only those of them."""
    if settings.part:  # what a package's format reads is its own
        return ()
    parts = () if settings.type in SINGLE_COLUMN_TYPES else WATCHED
    names = (*parts, *(WEIGHT_COLUMNS if settings.kind == "sft" else ()))
    named = {
        value
        for name, value in settings.model_dump().items()
        if name.startswith("field_") and not name.startswith("field_message_")
    }
    read = {*DEFAULT_COLUMNS.get(settings.type, ()), *named}
    if settings.type not in TYPES_WITH_TOOLS:
        read -= {settings.field_tools}
    elif settings.field_tools == TOOLS:
        read.add(FUNCTIONS)
    return tuple(name for name in names if name not in read and (not columns or name in columns))


def count_unread(
    values: Iterable[Any], settings: DatasetSettings, columns: Sequence[str] | None
) -> Unread:
    """The columns that are not read, of records with a non-empty value there."""
    watched = watched_columns(settings, columns)
    beside_text = [
        name
        for name in TEXT_PROMPT_COLUMNS
        if settings.type in PAIRS and name not in watched and (not columns or name in columns)
    ]
    reads_functions = settings.type in TYPES_WITH_TOOLS and settings.field_tools == TOOLS
    candidates = {*watched, *beside_text, FUNCTIONS}
    unread = Unread()
    for index, value in enumerate(values):
        if not isinstance(value, dict) or candidates.isdisjoint(value):
            continue
        prompt = value.get(settings.field_prompt)
        text = value.get(settings.field_instruction) if prompt is None else prompt
        more = () if isinstance(text, str) else beside_text
        if reads_functions and not _is_blank(value.get(TOOLS)):
            more = (*more, FUNCTIONS)
        names = [name for name in (*watched, *more) if not _is_blank(value.get(name))]
        if names:
            unread.add(index, {name: value[name] for name in names})
    return unread


def unread_keys(messages: Sequence[Message], template: str) -> dict[str, Any]:
    """The non-empty keys of messages that the chat template does not read, with a value of each."""
    if all(map(MESSAGE_KEYS.issuperset, messages)):
        return {}
    return {
        IN_MESSAGES + name: value
        for message in messages
        for name, value in message.items()
        if not (name in MESSAGE_KEYS or _is_blank(value) or reads_key(template, name))
        if (name, message["role"]) != ("name", "tool")
    }


def unread_columns(
    facts: Mapping[str, int],
    total: int,
    type_name: str,
    examples: Mapping[str, Mapping[str, Any]],
) -> Iterator[str]:
    """What nothing reads, one sentence each, of `total` records; `facts` are the counts by name,
    and `examples` have the location and `value` of one record each."""
    for name, count in facts.items():
        shown = examples.get(name)
        end = f"; for example {record_location(shown)}: {shown['value']}" if shown else ""
        of = f"{count:,} of {total:,} records have {name!r}, which"
        if name.startswith(IN_MESSAGES):
            yield f"{of} neither Penstock nor the chat template reads{end}"
        else:
            yield f"{of} type: {type_name} does not read; {column_remedy(name, type_name)}{end}"


@lru_cache(maxsize=1024)
def reads_key(template: str, name: str) -> bool:
    """Whether a chat template reads this key of messages."""
    # By its text: jinja2.meta finds the names of variables, and a key is an attribute of one.
    return re.search(rf"""[.'"]{re.escape(name)}\b""", template) is not None


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)


def column_remedy(name: str, type_name: str) -> str:
    """Suggestion how to have a column read."""
    if type_name == "instruction" and name in ALPACA_COLUMNS:
        return "write type: alpaca, which reads it"
    if name in TEXT_PROMPT_COLUMNS and type_name in PAIRS:
        return "only a prompt that is text is read with it; put it into the messages"
    if name in ("input", "context") and type_name in ("instruction", "alpaca", *PAIRS):
        return f"write field_input: {name}"
    if name in ("system", "system_prompt"):
        return f"write field_system: {name}"
    if name in ("tools", "functions") and type_name in TYPES_WITH_TOOLS:
        return f"write field_tools: {name}"
    if name in ("tools", "functions", "tool_calls"):
        return "write type: chat, with messages that call tools"
    if name in WEIGHT_COLUMNS:
        return f"write field_weight: {name}, if it says how much a record counts in the loss"
    if name in ("reasoning", "reasoning_content", "thinking"):
        return "put it into the answer, or into reasoning_content of a message of type: chat"
    return "put it into a column that is read"
