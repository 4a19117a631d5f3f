"""The messages that the package can print, with `…` in place of names and numbers."""

import ast
import re
from functools import cache

from tests.conftest import ROOT

PACKAGE = ROOT / "stages" / "penstock"
GAP = "…"


def _template(node: ast.AST) -> str | None:
    """A string expression as text; None for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) or GAP for part in node.values)
    return None


@cache
def templates() -> str:
    """All strings of the package, one after another; white space is one blank."""
    nodes = (n for f in sorted(PACKAGE.rglob("*.py")) for n in ast.walk(ast.parse(f.read_text())))
    found = (text for node in nodes if (text := _template(node)))
    return re.sub(r"\s+", " ", "\n".join(found))


def unknown_parts(message: str) -> list[str]:
    """Parts of a quoted message, between its gaps, that no string of the package contains.

    Lines, names of signals and `; it does not fit` are put together when a message is printed.
    """
    lines = message.replace("SIGKILL", GAP).replace("; it", f"{GAP}; it").replace("fit (", "fit…(")
    parts = (part.strip() for part in re.split(rf"{GAP}|\n", lines))
    return [part for part in parts if len(part) > 3 and part not in templates()]
