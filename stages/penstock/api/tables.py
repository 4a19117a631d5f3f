"""Small tables as text for terminals and as HTML for notebooks."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the store imports pydantic, which `penstock --help` does without
    from penstock.core.cache.store import StageResult

Rows = Sequence[Sequence[str]]
"""The first row is the heading."""


def table(rows: Rows) -> str:
    """Columns aligned by two spaces."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def html_table(rows: Rows) -> str:
    """The same as an HTML table; cells are escaped."""
    heading, *body = rows
    lines = [_html_row(heading, "th"), *(_html_row(row, "td") for row in body)]
    return f"<table>{''.join(lines)}</table>"


def _html_row(row: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in row)}</tr>"


def outcome_rows(outcomes: "Iterable[StageResult]") -> list[Sequence[str]]:
    """Status, duration and path of each stage's result."""
    heading = ("stage", "key", "status", "seconds", "where")
    return [
        heading,
        *((o.stage, o.key[:8], o.status, f"{o.seconds:.1f}", o.where) for o in outcomes),
    ]


def outcome_table(outcomes: "Iterable[StageResult]") -> str:
    """The same as text."""
    return table(outcome_rows(outcomes))
