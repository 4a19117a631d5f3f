"""A mistake of a user: how it is made, the command that meets it, and what is to be told."""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cli.command import penstock, small_run

Change = Callable[[Path], object]


@dataclass(frozen=True)
class Mistake:
    """`line` is a regular expression of the line that names the place: the first line of the error,
    or of a check the line of the fault. Exit code 0: a warning, in any line."""

    line: str
    command: str = "check run.yaml"
    sections: Mapping[str, Any] = field(default_factory=dict[str, Any])
    make: Change | None = None
    code: int = 2


def train(line: str, **settings: Any) -> Mistake:
    """A mistake in the section `train`."""
    return Mistake(line, sections={"train": settings})


def data(line: str, **settings: Any) -> Mistake:
    """A mistake in the section `data`."""
    return Mistake(line, sections={"data": settings})


def write(name: str, content: str | bytes) -> Change:
    """Write a file in the folder of the run."""

    def change(folder: Path) -> None:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def edit(change: Callable[[bytes], bytes]) -> Change:
    """Change the bytes of run.yaml."""

    def apply(folder: Path) -> None:
        (folder / "run.yaml").write_bytes(change((folder / "run.yaml").read_bytes()))

    return apply


def link(name: str, target: str) -> Change:
    """A symbolic link in the folder of the run."""
    return lambda folder: (folder / name).symlink_to(target)


def pipe(name: str) -> Change:
    """A pipe to which nobody writes."""
    return lambda folder: os.mkfifo(folder / name)


def copy(source: Path, name: str, *changes: Change) -> Change:
    """Copy a folder into the folder of the run as `name`, and change the copy."""

    def change(folder: Path) -> None:
        shutil.copytree(source, folder / name)
        for each in changes:
            each(folder / name)

    return change


def entries(name: str, **values: Any) -> Change:
    """Change entries of a JSON object."""

    def change(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def make_and_judge(mistake: Mistake, folder: Path) -> None:
    """Make the mistake in `folder`, the current one, and assert what the user is told."""
    small_run(folder, **mistake.sections)
    if mistake.make:
        mistake.make(folder)
    said = penstock(*mistake.command.split())
    lines = said.err.splitlines()
    assert said.code == mistake.code, said.err[-1500:]
    assert "Traceback" not in said.err
    assert "bug in Penstock" not in said.err
    if mistake.code:
        lines = lines[next(n for n, text in enumerate(lines) if text.startswith("error: ")) :]
        first = 1 if re.match(r"error: \d+ of \d+ checks found a fault", lines[0]) else 0
        lines = lines[first : first + 1]
    assert any(re.search(mistake.line, text) for text in lines), said.err[-1500:]
