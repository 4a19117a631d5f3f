"""Links, tables and folders of the documentation."""

from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.docs.pages import broken_links, find_pages, long_cells

PAGES = find_pages()
LOOKED_UP = [ROOT / "docs/models.md"]
"""Generated tables with a line for each model type."""
READ_PAGES = [
    page
    for page in ROOT.glob("docs/**/*.md")
    if page.parent.name != "benchmarks" and page not in LOOKED_UP
]
MAX_CELL = 200
MAX_LINES = 350
MAX_FILES = 25


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_and_their_anchors_exist(page):
    assert list(broken_links(page)) == []


def test_a_missing_file_and_a_missing_anchor_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# One `code` title: 2\n```\n# not this\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#one-code-title-2) [c](gone.md) [d](other.md#not-this)\n"
        "[e](#here) [f](https://example.org/x) `[g](no-link.md)`\n"
    )
    assert list(broken_links(page)) == ["gone.md", "other.md#not-this", "#here"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_table_cell_is_longer_than_can_be_read(page):
    assert long_cells(page.read_text(), MAX_CELL) == []


@pytest.mark.parametrize("page", READ_PAGES, ids=name_of)
def test_a_page_of_the_documentation_is_read_in_one_sitting(page):
    assert len(page.read_text().splitlines()) <= MAX_LINES


def test_no_folder_of_the_documentation_holds_more_than_can_be_listed():
    counts = Counter(page.parent for page in ROOT.glob("docs/**/*.md"))
    assert {str(f): n for f, n in counts.items() if n > MAX_FILES} == {}
