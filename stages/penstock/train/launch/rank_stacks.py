"""Python stacks of ranks that may hang: how a rank agrees to show its own, and how they are read.

`faulthandler` writes them from a signal handler that runs no Python, so it answers in the middle of
a blocked collective operation, too.
"""

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

REQUEST = signal.SIGUSR1
"""`kill -USR1 PID` makes a rank write the stacks of its threads."""

ANSWER_SECONDS = 5.0
"""How long ranks may take to write them."""

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_SECTION = re.compile(r"^(Current t|T)hread 0x")

_CARRIERS = (
    "/torch/_ops.py",
    "/torch/nn/",
    "/torch/autograd/",
    "/torch/_dynamo/",
    "/contextlib.py",
)
"""Files that only pass calls on: what they are in the middle of is the frame that called them."""

_WAITING = ("/torch/distributed/", "/penstock/engine/distributed/ranks.py")
"""Files whose code blocks only for other ranks."""

_open: list[TextIO] = []


@dataclass(frozen=True)
class Frame:
    """One call."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        parts = Path(self.file).parts
        return f"{'/'.join(parts[-3:])}:{self.line} {self.name}"


@dataclass(frozen=True)
class Stack:
    """The main thread's calls, innermost first."""

    frames: tuple[Frame, ...]

    @property
    def waits(self) -> bool:
        """Whether what it is in the middle of ends when other ranks have come as far."""
        doing = (f for f in self.frames if not any(part in f.file for part in _CARRIERS))
        innermost = next(doing, None)
        return innermost is not None and any(part in innermost.file for part in _WAITING)


def stack_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its stacks."""
    return folder / f"rank_{rank}.stack"


def show_on_request(folder: Path, rank: int) -> None:
    """Let this process write its stacks into its file in `folder` whenever it is asked to."""
    # Those of a rank that was started again go below those of the first.
    stream = stack_file(folder, rank).open("a")
    _open.append(stream)  # the handler keeps a number alone: the file must stay open
    faulthandler.register(REQUEST, file=stream, all_threads=True, chain=False)


def ask(folder: Path, pids: dict[int, int]) -> dict[int, Stack]:
    """The stacks of those processes, by rank; of those that answer in time."""
    before = {rank: _size(stack_file(folder, rank)) for rank in pids}
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, REQUEST)
    deadline = time.monotonic() + ANSWER_SECONDS
    sizes: dict[int, int] = {}
    while time.monotonic() < deadline:
        time.sleep(0.2)
        now = {rank: _size(stack_file(folder, rank)) for rank in pids}
        if now == sizes and all(now[rank] > before[rank] for rank in pids):
            break
        sizes = now
    found: dict[int, Stack] = {}
    for rank in pids:
        with contextlib.suppress(OSError), stack_file(folder, rank).open("rb") as stream:
            stream.seek(before[rank])
            lines = stream.read().decode(errors="replace").splitlines()
            if stack := main_stack(lines):
                found[rank] = stack
    return found


def main_stack(lines: Iterable[str]) -> Stack | None:
    """The main thread's stack in what `faulthandler` wrote; it writes that thread last."""
    frames: list[Frame] = []
    for line in lines:
        if _SECTION.match(line):
            frames = []
        elif match := _FRAME.match(line):
            frames.append(Frame(match["file"], int(match["line"]), match["name"]))
    return Stack(tuple(frames)) if frames else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
