"""Whether a test that a register names is there."""

import ast
from functools import cache
from pathlib import Path


@cache
def words_in(file: Path) -> tuple[frozenset[str], frozenset[object]]:
    """The functions that a file defines, and the constants it writes."""
    nodes = list(ast.walk(ast.parse(file.read_text()))) if file.is_file() else []
    functions = frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))
    return functions, frozenset(node.value for node in nodes if isinstance(node, ast.Constant))


def exists(folder: Path, test: str) -> bool:
    """Whether `file::test` or `file::test[case]` is there, told from the file's text alone."""
    file, _, rest = test.partition("::")
    name, _, case = rest.partition("[")
    functions, constants = words_in(folder / file)
    return name in functions and (not case or case.removesuffix("]") in constants)
