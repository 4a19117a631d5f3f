"""Stack dumps of hung ranks with `faulthandler`.

`faulthandler` writes the stack in a C signal handler, so it also works inside a blocked collective
operation.
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

DUMP_SIGNAL = signal.SIGUSR1
"""`kill -USR1 PID` makes a rank dump the stacks of its threads."""

DUMP_TIMEOUT_SECONDS = 5.0
"""Seconds to wait for the dumps."""

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_SECTION = re.compile(r"^(Current t|T)hread 0x")

_WRAPPER_FILES = (
    "/torch/_ops.py",
    "/torch/nn/",
    "/torch/autograd/",
    "/torch/_dynamo/",
    "/contextlib.py",
)
"""Wrapper files: their frames are skipped in favor of the caller's."""

_COLLECTIVE_FILES = ("/torch/distributed/", "/penstock/engine/distributed/ranks.py")
"""Files whose code only blocks in collective operations."""

_open_files: list[TextIO] = []


@dataclass(frozen=True)
class Frame:
    """One stack frame."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        parts = Path(self.file).parts
        return f"{'/'.join(parts[-3:])}:{self.line} {self.name}"


@dataclass(frozen=True)
class Stack:
    """The main thread's frames, innermost first."""

    frames: tuple[Frame, ...]

    @property
    def is_in_collective(self) -> bool:
        frames = (f for f in self.frames if not any(part in f.file for part in _WRAPPER_FILES))
        innermost = next(frames, None)
        return innermost is not None and any(part in innermost.file for part in _COLLECTIVE_FILES)


def stack_file(folder: Path, rank: int) -> Path:
    """The stack dump file of a rank."""
    return folder / f"rank_{rank}.stack"


def register_stack_dump(folder: Path, rank: int) -> None:
    """Register the signal handler that dumps this process's stacks into its file in `folder`."""
    # Append: stacks of a restarted rank go below those of the first start.
    stream = stack_file(folder, rank).open("a")
    # The handler only keeps the file descriptor, so the file must stay open.
    _open_files.append(stream)
    # Chained, the default action of SIGUSR1 would end the process.
    faulthandler.register(DUMP_SIGNAL, file=stream, all_threads=True, chain=False)


def dump_stacks(folder: Path, pids: dict[int, int]) -> dict[int, Stack]:
    """Request stack dumps; return the stacks by rank of the processes that respond in time."""
    before = {rank: _size(stack_file(folder, rank)) for rank in pids}
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, DUMP_SIGNAL)
    deadline = time.monotonic() + DUMP_TIMEOUT_SECONDS
    sizes: dict[int, int] = {}
    while time.monotonic() < deadline:
        time.sleep(0.2)
        now = {rank: _size(stack_file(folder, rank)) for rank in pids}
        # Two equal polls: a dump is written line by line.
        if now == sizes and all(now[rank] > before[rank] for rank in pids):
            break
        sizes = now
    stacks: dict[int, Stack] = {}
    for rank in pids:
        with contextlib.suppress(OSError), stack_file(folder, rank).open("rb") as stream:
            stream.seek(before[rank])
            lines = stream.read().decode(errors="replace").splitlines()
            if stack := main_stack(lines):
                stacks[rank] = stack
    return stacks


def main_stack(lines: Iterable[str]) -> Stack | None:
    """The main thread's stack in the output of `faulthandler`, which writes that thread last."""
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
