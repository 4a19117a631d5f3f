"""Every file, function and class that the code tour and the packages' READMEs name exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "stages" / "penstock"
PAGES = [
    ROOT / "docs" / "code-tour.md",
    ROOT / "stages" / "README.md",
    *sorted(PACKAGE.rglob("README.md")),
]
NAMED = re.compile(r"`([\w/]+\.py)(?::\s([\w.,\s]+))?`")
LINKED = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@cache
def definitions(file):
    """Functions and classes of a file, and methods as `Class.method`."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{method.name}" for method in inner}
    return found


def resolved(page, name) -> Path | None:
    """The file that a page means: relative to itself, to the package or to the repository."""
    candidates = (base / name for base in (page.parent, PACKAGE, ROOT))
    return next((path for path in candidates if path.is_file()), None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_in_the_pages_exist(page):
    missing = []
    for name, symbols in NAMED.findall(page.read_text()):
        file = resolved(page, name)
        if file is None:
            missing.append(name)
            continue
        wanted = {symbol.strip() for symbol in symbols.split(",") if symbol.strip()}
        missing += [f"{name}: {symbol}" for symbol in sorted(wanted - definitions(file))]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_in_the_pages_lead_to_files(page):
    assert [t for t in LINKED.findall(page.read_text()) if not (page.parent / t).exists()] == []


def test_packages_of_several_files_have_a_readme():
    parts = ("core", "config", "prepare", "train", "engine", "server")
    direct = [folder for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()]
    within = [
        f for part in parts for f in (PACKAGE / part).iterdir() if (f / "__init__.py").exists()
    ]
    several = [f for f in (*direct, *within) if len(list(f.glob("[!_]*.py"))) >= 4]
    assert [str(f.relative_to(PACKAGE)) for f in several if not (f / "README.md").exists()] == []
