"""The Markdown files of the repository, and what is read out of them."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.conftest import ROOT

FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
SKIPPED = {".venv", ".git", "artifacts", "outputs", "shared", "site", "node_modules"}


def find_pages() -> list[Path]:
    """Every Markdown file outside environments, results and hidden folders."""
    folders = [p for p in ROOT.iterdir() if p.is_dir() and p.name not in SKIPPED]
    found = [f for p in folders if not p.name.startswith(".") for f in p.rglob("*.md")]
    return sorted([*ROOT.glob("*.md"), *found])


def without_code(text: str) -> str:
    """Without fenced code and without the content of code spans."""
    return re.sub(r"(`+)[^`\n]*?\1", "``", FENCE.sub("", text))


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that GitHub gives the headings of a page; repeated ones get -1, -2, ..."""
    seen: dict[str, int] = {}
    made = set()
    for title in HEADING.findall(FENCE.sub("", page.read_text())):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        made.add(f"{slug}-{count}" if count else slug)
    return frozenset(made)


def broken_links(page: Path) -> Iterator[str]:
    """Relative links of a page whose file or anchor does not exist."""
    for target in LINK.findall(without_code(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and (file.is_dir() or anchor not in anchors(file))):
            yield target


def long_cells(text: str, limit: int) -> list[str]:
    """Table cells of more than `limit` characters."""
    rows = [line for line in FENCE.sub("", text).splitlines() if line.startswith("|")]
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    return [cell for cell in cells if len(cell) > limit]
