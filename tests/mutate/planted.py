"""Plants one bug at a time: `python -m tests.mutate.planted [ID ...]` says which tests notice it.

planted.json has bugs that a refactoring could bring: the text of one place and what it becomes.
Each is planted in a copy of the tree, in which the tests that ought to notice it run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

BUGS = Path(__file__).with_name("planted.json")
OPTIONS = ("-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", "not exhaustive")
NOTICED = ("FAILED ", "ERROR ")
"""How pytest's lines of failures begin."""


@dataclass(frozen=True)
class Bug:
    """A place in a file of the product, and what it becomes."""

    id: str
    file: str
    old: str
    new: str
    effect: str
    """What a user would see."""
    tests: tuple[str, ...]
    """Files that ought to notice it."""

    def is_stale(self, root: Path) -> bool:
        """Whether the place is no longer there, or is there twice."""
        path = root / self.file
        return not path.is_file() or path.read_text().count(self.old) != 1


def read_bugs() -> list[Bug]:
    """All of planted.json."""
    return [Bug(**{**bug, "tests": tuple(bug["tests"])}) for bug in json.loads(BUGS.read_text())]


@contextmanager
def copied_tree() -> Iterator[Path]:
    """The committed tree in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run([*git, "add", "--quiet", "--detach", tree, "HEAD"], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", tree], check=True)


def judge(bug: Bug, tree: Path, seconds: float) -> str:
    """The first test that notices it; else `SURVIVED`, or what kept the tests from running."""
    if bug.is_stale(tree):
        return "stale: its place is gone"
    path = tree / bug.file
    content = path.read_text()
    # Before the installed packages, which lead to the tree that is copied.
    sources = os.pathsep.join(str(tree / folder) for folder in ("stages", "kernels"))
    path.write_text(content.replace(bug.old, bug.new))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *OPTIONS, *bug.tests],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": sources, "TEST_DAY": "every"},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not judged within {seconds:.0f} s"
    finally:
        path.write_text(content)
    failures = [line for line in done.stdout.splitlines() if line.startswith(NOTICED)]
    if failures:
        return failures[0].partition(" - ")[0]
    return "SURVIVED" if done.returncode == 0 else f"pytest exited with {done.returncode}"


def main(words: Sequence[str] | None = None) -> int:
    """Judge the bugs that are named, or all; the number of those that nothing noticed."""
    parser = argparse.ArgumentParser("python -m tests.mutate.planted", description=__doc__)
    parser.add_argument("ids", nargs="*", metavar="ID", help="only these; a prefix is enough")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each bug's tests")
    options = parser.parse_args(words)
    survivors = 0
    with copied_tree() as tree:
        for bug in read_bugs():
            if options.ids and not bug.id.startswith(tuple(options.ids)):
                continue
            started = time.monotonic()
            outcome = judge(bug, tree, options.timeout)
            survivors += not outcome.startswith(NOTICED)
            print(
                f"{bug.id} {bug.file}: {outcome} ({time.monotonic() - started:.0f} s)", flush=True
            )
    print(f"{survivors} survived")
    return min(survivors, 100)


if __name__ == "__main__":
    sys.exit(main())
