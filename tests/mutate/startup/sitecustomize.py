"""Runs at the start of every Python process of a mutation check: one config field is ignored.

`MUTATION_FILE` names a file with the mutant as JSON: `classes` that declare the field, its `name`,
what is read instead (`value`; without it the field's default), and whether validation and the
identity of stages ignore it too (`validation`, `identity`). An empty file is no mutant. Forks read
it again, so that a preloaded server of processes serves many mutants.
"""

import importlib.machinery
import json
import os
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "MUTATION_FILE"
mutant: dict[str, Any] = {}
_validation = threading.local()


def read_mutant() -> None:
    """Read the mutant that is in force."""
    path = Path(os.environ[VARIABLE])
    mutant.clear()
    mutant.update(json.loads((path.read_text() if path.exists() else "") or "{}"))


@contextmanager
def _validating():
    """Validation sees what was written: only code that uses a field ignores it."""
    depth = getattr(_validation, "depth", 0)
    _validation.depth = depth + 1
    try:
        yield
    finally:
        _validation.depth = depth


def _applies(section: type, name: str) -> bool:
    if name != mutant.get("name"):
        return False
    if getattr(_validation, "depth", 0) and not mutant["validation"]:
        return False
    return any(one.__name__ in mutant["classes"] for one in section.__mro__)


def _constant(section: Any) -> Any:
    if "value" in mutant:
        return mutant["value"]
    return section.model_fields[mutant["name"]].get_default(call_default_factory=True)


def _patch_sections(module: ModuleType) -> None:
    """Read a constant instead of the field, outside of pydantic's validators."""
    base = module.Settings

    def read(self: Any, name: str) -> Any:
        if name == mutant.get("name") and _applies(type(self), name):
            return _constant(type(self))
        return super(base, self).__getattribute__(name)

    def dump(self: Any, **options: Any) -> dict[str, Any]:
        written = super(base, self).model_dump(**options)
        name = mutant.get("name", "")
        if name in written and mutant["identity"] and _applies(type(self), name):
            written[name] = _constant(type(self))
        return written

    def construct(self: Any, /, **values: Any) -> None:
        with _validating():
            super(base, self).__init__(**values)

    def validated(section: Any, *args: Any, **options: Any) -> Any:
        with _validating():
            return super(base, section).model_validate(*args, **options)

    construct.__pydantic_base_init__ = True  # pyright: ignore[reportFunctionMemberAccess]
    base.__getattribute__ = read
    base.model_dump = dump
    base.__init__ = construct
    base.model_validate = classmethod(validated)


def _patch_validation(module: ModuleType) -> None:
    """Rules see what was written."""
    judged = module.validate

    def validate(*args: Any, **options: Any) -> Any:
        with _validating():
            return judged(*args, **options)

    module.validate = validate  # pyright: ignore[reportAttributeAccessIssue]


PATCHES = {
    "penstock.config.schema.base": _patch_sections,
    "penstock.config.loading.validate": _patch_validation,
}


class _Patching:
    """Finds the modules of PATCHES as usual, and patches them once they are executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            PATCHES[name](module)

        spec.loader.exec_module = execute_and_patch
        return spec


if VARIABLE in os.environ:
    read_mutant()
    os.register_at_fork(after_in_child=read_mutant)
    sys.meta_path.insert(0, _Patching())  # pyright: ignore[reportArgumentType]
