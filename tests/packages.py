"""Packages with entry points, as an installer leaves them in a folder of sys.path."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.core import extensions


def write_package(
    folder: Path, name: str, version: str, entry_points: Mapping[str, Mapping[str, str]], code: str
) -> Path:
    """Write a distribution whose one module `<name>` has this code; returns the folder."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        line
        for group, targets in entry_points.items()
        for line in (f"[{group}]", *(f"{part} = {target}" for part, target in targets.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (folder / f"{name}.py").write_text(code)
    return folder


@contextmanager
def installed(*folders: Path) -> Iterator[None]:
    """These folders are on sys.path, and their modules are forgotten afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in folders:
            patch.syspath_prepend(folder)
        _forget()
        try:
            yield
        finally:
            for module, source in list(sys.modules.items()):
                file = getattr(source, "__file__", None) or ""
                if any(file.startswith(str(folder)) for folder in folders):
                    del sys.modules[module]
    _forget()


def _forget() -> None:
    extensions._all_entry_points.cache_clear()
    extensions._installed.cache_clear()
    extensions._load.cache_clear()
