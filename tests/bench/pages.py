"""Figures in docs/benchmarks: pages of sections, each of which one script writes."""

import re
from collections.abc import Sequence
from pathlib import Path

PAGES = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


def write_section(page: str, title: str, lines: Sequence[str], folder: Path = PAGES) -> None:
    """Write the section of that title, in place of an earlier one or at the end of its page."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{page}.md"
    text = file.read_text() if file.is_file() else ""
    section = "\n".join([f"## {title}", "", *lines, ""])
    old = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    if old.search(text):
        # Not as a pattern: figures may hold backslashes.
        text = old.sub(lambda found: section + "\n" * (found.end() < len(text)), text)
    else:
        text = f"{text}\n{section}" if text else section
    file.write_text(text)
