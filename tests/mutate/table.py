"""The table of mutants: for each field what notices that it is ignored."""

import ast
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

TABLE = Path(__file__).parent / "table.tsv"
ROOT = Path(__file__).parents[2]
HEAD = ("field", "outcome", "test or reason")


@dataclass(frozen=True)
class Row:
    """One field."""

    field: str
    outcome: str
    """`noticed`: the test fails where code reads a constant instead of the field.
    `refused`: the field's only effect is that validation refuses values, which is what fails.
    `explained`: no test can fail; the reason says why.
    `not run`: the test is expected to fail, and was not run under the mutant."""
    told: str
    """The test, or the reason."""


def read_rows() -> dict[str, Row]:
    """The rows by field."""
    lines = TABLE.read_text().splitlines()[1:]
    rows = [Row(*line.split("\t")) for line in lines]
    return {row.field: row for row in rows}


def write_rows(rows: Iterable[Row]) -> None:
    """Write the rows in the order in which they come."""
    lines = ["\t".join(row) for row in (HEAD, *map(astuple, rows))]
    TABLE.write_text("\n".join(lines) + "\n")


@cache
def _functions(file: Path) -> frozenset[str]:
    nodes = ast.walk(ast.parse(file.read_text())) if file.is_file() else ()
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))


def exists(test: str) -> bool:
    """Whether the function of `file::test[case]` is there, told from the file's text alone."""
    file, _, name = test.partition("::")
    return name.partition("[")[0] in _functions(ROOT / file)
