"""Hook of mkdocs: pages of the repository outside docs/ are part of the site, under repository/.

Links are written for the repository. Here those that leave docs/ lead to these pages, and those to
files that are no pages become plain text.
"""

# pyright: reportMissingImports=false
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("configs", "deploy", "flows", "kernels", "stages", "tests")
PREFIX = "repository/"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^()\s]+)\)")
FENCED = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)


def repository_pages() -> set[str]:
    """Markdown files outside docs/, as paths in the repository."""
    pages = [*ROOT.glob("*.md"), *(f for name in FOLDERS for f in (ROOT / name).rglob("*.md"))]
    return {f.relative_to(ROOT).as_posix() for f in pages}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/."""
    for path in sorted(repository_pages()):
        content = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, f"{PREFIX}{path}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page, except in code."""
    parts = FENCED.split(markdown)
    path = page.file.src_uri
    parts[::2] = [LINK.sub(lambda m: _link(m, path), part) for part in parts[::2]]
    return "".join(parts)


def _link(match: re.Match[str], page: str) -> str:
    text, (name, _, anchor) = match[1], match[2].partition("#")
    if re.match(r"[a-z]+:", name) or not name:
        return match[0]
    source = page.removeprefix(PREFIX) if page.startswith(PREFIX) else f"docs/{page}"
    target = os.path.normpath(PurePosixPath(source).parent / name)
    if target.startswith("docs/"):
        path = target.removeprefix("docs/")
    elif target in repository_pages():
        path = f"{PREFIX}{target}"
    elif (ROOT / target).exists():
        return text
    else:
        return match[0]
    relative = os.path.relpath(path, PurePosixPath(page).parent)
    return f"[{text}]({relative}{f'#{anchor}' if anchor else ''})"
