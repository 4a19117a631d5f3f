"""What the driver's tool says of this machine's GPUs, asked without importing torch."""

import re
import subprocess
from dataclasses import dataclass

from penstock.core import env

SECONDS = 30
"""The tool answers within one, unless a device hangs."""


@dataclass(frozen=True)
class Gpus:
    """The CUDA devices of this machine."""

    count: int
    """Those that this process may use."""
    capability: tuple[int, int] | None = None
    """The highest of any device; None where nobody says."""
    linked: bool | None = None
    """Whether NVLink joins any two of them; None where nobody says."""


def gpus_here() -> Gpus:
    """The devices, with what `nvidia-smi` tells of them where there is one."""
    count = env.num_gpus()
    if not count:
        return Gpus(0)
    return Gpus(
        count,
        highest_capability(_answer("--query-gpu=compute_cap", "--format=csv,noheader")),
        any_linked(_answer("topo", "-p2p", "n")),
    )


def names_of_gpus() -> list[str]:
    """The names of the devices, in the driver's order; none where it tells none."""
    count = env.num_gpus()
    answer = _answer("--query-gpu=name", "--format=csv,noheader") if count else None
    return [line.strip() for line in (answer or "").splitlines() if line.strip()][:count]


def highest_capability(answer: str | None) -> tuple[int, int] | None:
    """From lines such as `9.0`, one for each device; None where there is no such line."""
    found = re.findall(r"^\s*(\d+)\.(\d+)\s*$", answer or "", re.MULTILINE)
    return max(((int(major), int(minor)) for major, minor in found), default=None)


def any_linked(answer: str | None) -> bool | None:
    """From a matrix whose rows begin with `GPU0` and say `OK` for each other GPU within reach over
    NVLink; None where there is no matrix."""
    rows = re.findall(r"^\s*GPU\d+((?:\s+(?:X|[A-Z]{2,3}))+)\s*$", answer or "", re.MULTILINE)
    return any("OK" in row.split() for row in rows) if rows else None


def _answer(*question: str) -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", *question],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
