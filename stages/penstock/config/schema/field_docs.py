"""Field descriptions, read from the docstring under each field.

Pydantic's `use_attribute_docstrings` parses the source of every model at import, which would take a
fifth of the time of `penstock run` on a finished pipeline. Only the generated pages need the
descriptions, so they are read when `config.generate_docs` is imported.
"""

import ast
import inspect
import sys
from functools import cache

from pydantic import BaseModel


def describe_fields(*models: type[BaseModel]) -> None:
    """Set `description` of every field that has none to the docstring beneath its declaration."""
    for model in models:
        for base in reversed(model.__mro__):
            written = _module_docstrings(base.__module__).get(base.__qualname__, {})
            for name in written.keys() & model.model_fields.keys():
                model.model_fields[name].description = written[name]


@cache
def _module_docstrings(module: str) -> dict[str, dict[str, str]]:
    """Docstrings of annotated attributes, by class and attribute."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # a module without source, such as builtins
        return {}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {declared.name: dict(_attribute_docstrings(declared)) for declared in classes}


def _attribute_docstrings(declared: ast.ClassDef) -> list[tuple[str, str]]:
    pairs = zip(declared.body, declared.body[1:], strict=False)
    return [
        (field.target.id, inspect.cleandoc(text.value.value))
        for field, text in pairs
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    ]
