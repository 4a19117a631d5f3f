"""GPU discovery with `nvidia-smi`, without importing torch."""

import re
import subprocess
from dataclasses import dataclass

from penstock.core import env

TIMEOUT_SECONDS = 30  # Timeout in seconds; `nvidia-smi` returns within one unless a device hangs


@dataclass(frozen=True)
class Gpus:
    """The CUDA devices of this machine."""

    count: int  # Number of devices available to this process
    capability: tuple[int, int] | None = None
    """The highest compute capability of any device; None if unknown."""
    has_nvlink: bool | None = None
    """Whether any two devices are connected by NVLink; None if unknown."""


def detect_gpus() -> Gpus:
    """The devices, with the output of `nvidia-smi` where it is installed."""
    count = env.num_gpus()
    if not count:
        return Gpus(0)
    return Gpus(
        count,
        highest_capability(_query_nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader")),
        any_linked(_query_nvidia_smi("topo", "-p2p", "n")),
    )


def gpu_names() -> list[str]:
    """Device names in driver order; empty if unknown."""
    count = env.num_gpus()
    output = _query_nvidia_smi("--query-gpu=name", "--format=csv,noheader") if count else None
    return [line.strip() for line in (output or "").splitlines() if line.strip()][:count]


def highest_capability(output: str | None) -> tuple[int, int] | None:
    """Parse lines such as `9.0`, one per device; None if there is no such line."""
    capabilities = re.findall(r"^\s*(\d+)\.(\d+)\s*$", output or "", re.MULTILINE)
    return max(((int(major), int(minor)) for major, minor in capabilities), default=None)


def any_linked(output: str | None) -> bool | None:
    """Parse the NVLink matrix, whose rows begin with `GPU0` and contain `OK` for each GPU reachable
    over NVLink; None if there is no matrix."""
    rows = re.findall(r"^\s*GPU\d+((?:\s+(?:X|[A-Z]{2,3}))+)\s*$", output or "", re.MULTILINE)
    return any("OK" in row.split() for row in rows) if rows else None


def _query_nvidia_smi(*question: str) -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", *question],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
