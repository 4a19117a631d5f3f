"""GPU discovery with `nvidia-smi`, without importing torch."""

import re
import subprocess
from dataclasses import dataclass

from penstock.core import env

SECONDS = 30
"""Timeout in seconds; `nvidia-smi` returns within one unless a device hangs."""


@dataclass(frozen=True)
class Gpus:
    """The CUDA devices of this machine."""

    count: int
    """Number of devices available to this process."""
    capability: tuple[int, int] | None = None
    """The highest compute capability of any device; None if unknown."""
    linked: bool | None = None
    """Whether any two devices are connected by NVLink; None if unknown."""


def gpus_here() -> Gpus:
    """The devices, with the output of `nvidia-smi` where it is installed."""
    count = env.num_gpus()
    if not count:
        return Gpus(0)
    return Gpus(
        count,
        highest_capability(_answer("--query-gpu=compute_cap", "--format=csv,noheader")),
        any_linked(_answer("topo", "-p2p", "n")),
    )


def names_of_gpus() -> list[str]:
    """Device names in driver order; empty if unknown."""
    count = env.num_gpus()
    answer = _answer("--query-gpu=name", "--format=csv,noheader") if count else None
    return [line.strip() for line in (answer or "").splitlines() if line.strip()][:count]


def highest_capability(answer: str | None) -> tuple[int, int] | None:
    """Parse lines such as `9.0`, one per device; None if there is no such line."""
    found = re.findall(r"^\s*(\d+)\.(\d+)\s*$", answer or "", re.MULTILINE)
    return max(((int(major), int(minor)) for major, minor in found), default=None)


def any_linked(answer: str | None) -> bool | None:
    """Parse the NVLink matrix, whose rows begin with `GPU0` and contain `OK` for each GPU reachable
    over NVLink; None if there is no matrix."""
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
