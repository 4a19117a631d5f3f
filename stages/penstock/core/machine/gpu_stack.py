"""Driver, CUDA, PyTorch and Triton: which versions work together.

Sources: NVIDIA's CUDA Compatibility guide (minor version compatibility) for drivers, the metadata
of PyTorch's wheels for the rest.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from penstock.core.machine.linux import PROC

MIN_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""The oldest Linux driver by CUDA's major version."""

DRIVER_FILE = PROC / "driver/nvidia/version"


@dataclass(frozen=True)
class Mismatch:
    """Two parts that do not work together."""

    subject: str
    finding: str
    fix: str


def read_driver(file: Path = DRIVER_FILE) -> str | None:
    """The version of the loaded NVIDIA driver; None without one."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return match[1] if match else None


def check_driver(cuda: str, driver: str | None) -> Mismatch | None:
    """Whether the driver runs programs of this CUDA version."""
    least = MIN_DRIVER.get(int(cuda.partition(".")[0]))
    if driver is None or least is None or Version(driver) >= Version(least):
        return None
    return Mismatch(
        "driver",
        f"{driver}, and PyTorch's CUDA {cuda} needs {least} or newer",
        "update the driver, or install a PyTorch wheel for an older CUDA",
    )


def check_architectures(
    built: Sequence[str], capabilities: Iterable[tuple[int, int]]
) -> Mismatch | None:
    """Whether PyTorch has kernels for each GPU. `built`: its list, such as sm_90, compute_90."""
    binaries, portable = (
        [
            int(match[1])
            for architecture in built
            if (match := re.match(rf"{kind}_(\d+)", architecture))
        ]
        for kind in ("sm", "compute")
    )
    for major, minor in capabilities:
        number = 10 * major + minor
        # A binary runs on later GPUs of its generation; portable code on all later ones.
        runs = any(binary // 10 == major and binary <= number for binary in binaries)
        if not runs and not any(oldest <= number for oldest in portable):
            return Mismatch(
                "GPU architecture",
                f"sm_{number}, and PyTorch is built for {', '.join(built)}",
                "install a PyTorch wheel that is built for this GPU",
            )
    return None


def check_triton() -> Mismatch | None:
    """Whether the installed Triton is what the installed PyTorch asks for."""
    try:
        return _compare_triton(requires("torch") or [], version("triton"))
    except PackageNotFoundError:
        return None


def _compare_triton(requirements: Sequence[str], installed: str) -> Mismatch | None:
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if requirement.name != "triton" or (marker and not marker.evaluate()):
            continue
        # By default, packaging counts a pre-release, such as a nightly build, as outside of any
        # range.
        if not requirement.specifier.contains(installed, prereleases=True):
            return Mismatch(
                "triton",
                f"{installed}, and PyTorch is built for triton{requirement.specifier}",
                f"pip install 'triton{requirement.specifier}'",
            )
    return None
