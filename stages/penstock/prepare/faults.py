"""Records that cannot be used: why, where, and how many."""

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Reason = Literal[
    "invalid_json",
    "missing_column",
    "wrong_type",
    "bad_value",
    "template",
    "empty",
    "no_trained_tokens",
]

DROPPED = ("empty", "no_trained_tokens")
"""Reasons that leave a record out without blaming the data for it."""

SAMPLES_KEPT = 10


class BadRow(Exception):  # noqa: N818 - a fact about a record; it never leaves this package
    """The record cannot become a sample."""

    def __init__(self, reason: Reason, why: str) -> None:
        super().__init__(why)
        self.reason: Reason = reason
        self.why = why


def column(record: Mapping[str, Any], name: str) -> Any:
    """The record's value. Raises BadRow that names the columns there are, the nearest first."""
    if name in record:
        return record[name]
    near = difflib.get_close_matches(name, list(record), n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise BadRow("missing_column", f"no column {name!r}; it has {', '.join(record)}{hint}")


def text(record: Mapping[str, Any], name: str) -> str:
    """The record's value, which must be a string."""
    return checked_text(name, column(record, name))


def checked_text(where: str, value: Any) -> str:
    """`value`, found at `where`, which must be a string that UTF-8 can hold."""
    if not isinstance(value, str):
        raise BadRow("wrong_type", f"{where} is {kind_of(value)} where a string is meant")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        why = f"{where} is not text: half of a surrogate pair at character {error.start + 1}"
        raise BadRow("bad_value", why) from None
    return value


def optional_text(record: Mapping[str, Any], name: str | None) -> str:
    """The record's value where a column is named; empty where it is not, or holds null."""
    if name is None or column(record, name) is None:
        return ""
    return text(record, name)


def kind_of(value: Any) -> str:
    """What people call the type of a JSON value."""
    names = {type(None): "null", dict: "an object", list: "a list", bool: "a boolean"}
    return names.get(type(value)) or {int: "a number", float: "a number", str: "a string"}.get(
        type(value), type(value).__name__
    )


@dataclass
class Tally:
    """What became of a run of records."""

    records: int = 0
    rows: int = 0
    truncated: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, Any]] = field(default_factory=list)
    """The first few that were left out: file, line, reason (a word), why (a sentence)."""

    @property
    def bad(self) -> int:
        """Records that are unusable, those left out for other reasons not counted."""
        return sum(count for reason, count in self.left_out.items() if reason not in DROPPED)

    def leave_out(self, file: str, line: int, fault: BadRow) -> None:
        """Count a record that gives no sample."""
        self.left_out[fault.reason] += 1
        if len(self.samples) < SAMPLES_KEPT:
            self.samples.append(
                {"file": file, "line": line, "reason": fault.reason, "why": fault.why}
            )

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, read back by `of_json`."""
        return {
            "records": self.records,
            "rows": self.rows,
            "truncated": self.truncated,
            "left_out": dict(sorted(self.left_out.items())),
            "samples": self.samples,
        }

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> "Tally":
        """A tally as it was written."""
        return cls(**{**value, "left_out": Counter(value["left_out"])})

    @classmethod
    def total(cls, tallies: Iterable["Tally"]) -> "Tally":
        """Several tallies as one."""
        total = cls()
        for tally in tallies:
            total.records += tally.records
            total.rows += tally.rows
            total.truncated += tally.truncated
            total.left_out += tally.left_out
            total.samples = (total.samples + tally.samples)[:SAMPLES_KEPT]
        return total


def listed(samples: Sequence[Mapping[str, Any]]) -> str:
    """Samples as lines for people: `file:line: why`."""
    return "\n".join(f"    {s['file']}:{s['line']}: {s['why']}" for s in samples)
