"""A command in a process of its own: seconds, and the peak of memory of all its processes."""

import os
import resource
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SAMPLE_SECONDS = 0.02


@dataclass(frozen=True)
class Taken:
    """What a command took."""

    seconds: float
    processor_seconds: float
    """Of all its processes that ended."""
    peak_bytes: int
    """Largest sum of proportional sets, as sampled: shorter peaks are not seen."""
    output: str


def run_measured(command: Sequence[str], **variables: str) -> Taken:
    """Run it to its end. Raises CalledProcessError if it fails."""
    before, started, peak = _used(), time.perf_counter(), 0
    with subprocess.Popen(
        command,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        while process.poll() is None:
            peak = max(peak, sum(map(_proportional_set, family_of(process.pid))))
            time.sleep(SAMPLE_SECONDS)
        assert process.stdout
        output = process.stdout.read()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output)
    return Taken(time.perf_counter() - started, _used() - before, peak, output)


def family_of(pid: int) -> list[int]:
    """The process and those it started, and so on."""
    family, position = [pid], 0
    while position < len(family):
        for task in Path(f"/proc/{family[position]}/task").glob("*/children"):
            with suppress(OSError):
                family += map(int, task.read_text().split())
        position += 1
    return family


def _proportional_set(pid: int) -> int:
    with suppress(OSError, IndexError, ValueError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return int(text.partition("\nPss:")[2].split()[0]) * 1024
    return 0


def _used() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
