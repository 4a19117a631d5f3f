"""Whether a test that a register names is there."""

import ast
from functools import cache
from pathlib import Path


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def exists(folder: Path, test: str) -> bool:
    """Whether `file::test` or `file::test[case]` is there, told from the file's text alone."""
    within, _, rest = test.partition("::")
    name, _, case = rest.partition("[")
    file = folder / within
    if not file.is_file():
        return False
    functions = {n.name for n in ast.walk(parsed(file)) if isinstance(n, ast.FunctionDef)}
    texts = {n.value for n in ast.walk(parsed(file)) if isinstance(n, ast.Constant)}
    return name in functions and (not case or case.removesuffix("]") in texts)
