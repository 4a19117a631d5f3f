"""What a run would compute on, and how fast that is: measured here, or by its maker's data sheet.

No torch: `measuring.py` measures, in a process of its own.
"""

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.core import env
from penstock.core.errors import ConfigError
from penstock.core.files import read_json, write_json
from penstock.core.machine.device_specs import DEVICES, Precision, device_called
from penstock.core.machine.gpus import names_of_gpus

if TYPE_CHECKING:  # how models are cut imports what models are made of
    from penstock.costs.sharded_model import Kind

GB = 1e9

NETWORK = 50 * GB
"""Bytes a second that an accelerator sends to other machines: a port of 400 Gbit/s for each."""

IN_A_MACHINE = 8
"""Accelerators of a machine, where nobody says."""

BFLOAT16_UNITS = {"avx512_bf16", "amx_bf16", "bf16"}
"""What Linux calls them, on x86-64 and on Arm."""

REACHED: Mapping[Literal["measured", "tabled"], float] = {"measured": 0.55, "tabled": 0.5}
"""The share of a speed that a layer's products reach: of square products that were measured, and
of what a data sheet promises, which no product reaches."""


@dataclass(frozen=True)
class Machine:
    """What one rank computes on. Speeds are per second; None where nobody knows."""

    name: str
    kind: "Kind"
    speeds: Mapping[Precision, float]
    bandwidth: float | None
    """Bytes of its memory, read and written."""
    known_by: Literal["measured", "tabled"] | None = None
    memory: float | None = None
    """Bytes."""
    link: float = 10 * GB
    """Bytes to others of the same machine, each way."""
    local: int = IN_A_MACHINE
    """Ranks that share a machine."""

    def speed(self, width: int) -> float | None:
        """Operations with numbers of so many bytes, as layers reach them."""
        precisions: Mapping[int, Precision] = {1: "fp8", 2: "bf16", 4: "fp32"}
        found = self.speeds.get(precisions[width])
        return found * REACHED[self.known_by] if found and self.known_by else None


def machine_here(local_ranks: int) -> Machine:
    """This machine, of which a run uses so many ranks."""
    if names := names_of_gpus():
        return machine_called(names[0], local=len(names))
    return processors(measured().get(_cpu()), local_ranks)


def processors(told: Mapping[str, Any] | None, local_ranks: int) -> Machine:
    """This machine's processors and memory, shared by so many ranks; `told` is what was measured of
    all of them together."""
    whole = _memory()
    memory = whole and whole / local_ranks
    if told is None:
        return Machine(_cpu(), "cpu", {}, None, memory=memory, local=local_ranks)
    speeds: dict[Precision, float] = {
        "fp32": told["fp32"] / local_ranks,
        "bf16": told["bf16"] / local_ranks,
    }
    bandwidth = told["bandwidth"] / local_ranks
    # What ranks send one another is copied a few times.
    link = bandwidth / 4
    return Machine(_cpu(), "cpu", speeds, bandwidth, "measured", memory, link, local_ranks)


def machine_called(name: str, *, local: int = IN_A_MACHINE) -> Machine:
    """An accelerator by its name. Raises ConfigError for one that nobody knows."""
    device = device_called(name)
    told = measured().get(name)
    if device is None and told is None:
        raise ConfigError(
            f"{name} is not known, so neither is how fast it is.\n"
            f"  Known are {', '.join(sorted(DEVICES))}; on a machine that has it, penstock doctor "
            "--measure tells."
        )
    memory = device.memory if device else None
    link = device.link if device else 10 * GB
    if told:
        speeds: dict[Precision, float] = {"fp32": told["fp32"], "bf16": told["bf16"]}
        bandwidth, memory = told["bandwidth"], memory or told.get("memory")
        return Machine(name, "cuda", speeds, bandwidth, "measured", memory, link, local)
    assert device
    precisions: tuple[Precision, ...] = ("fp32", "bf16", "fp8")
    speeds = {one: speed for one in precisions if (speed := device.peak(one))}
    return Machine(name, "cuda", speeds, device.bandwidth, "tabled", memory, link, local)


def measured() -> Mapping[str, dict[str, Any]]:
    """What `remember` was told, by the name of what was measured."""
    try:
        return read_json(_file())
    except (OSError, json.JSONDecodeError):
        return {}


def slow_bfloat16() -> str | None:
    """What to write where products in bfloat16 are slower here than in float32: as measured, else
    where the processors have no units for them, as with AVX2 alone. None on GPUs."""
    if names_of_gpus():
        return None
    told = measured().get(_cpu())
    if told and told["bf16"] >= told["fp32"]:
        return None
    if told:
        slower = f"{told['fp32'] / told['bf16']:.3g} x slower than float32 on this CPU (measured)"
    elif _has_bfloat16_units():
        return None
    else:
        slower = "many times slower than float32 on this CPU, which has no units for it"
    return f"bfloat16 is {slower}; train.enable_mixed_precision: false trains in float32"


def _has_bfloat16_units() -> bool:
    """Whether the processors say that they have; those that say nothing may."""
    lines = [line for line in _cpuinfo() if line.startswith(("flags", "Features"))]
    return not lines or bool(BFLOAT16_UNITS & set(lines[0].split()))


def remember(found: Mapping[str, Any]) -> str:
    """Keep what was measured of this machine, for plans; returns its name."""
    name = found.get("name") or _cpu()
    write_json(_file(), {**measured(), name: dict(found)})
    return name


def _file() -> Path:
    return env.cache_home() / "speeds.json"


def _cpu() -> str:
    """This machine's processors by kind and number: other numbers are other speeds."""
    lines = _cpuinfo()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(models, platform.processor() or platform.machine())} x {env.num_processors()}"


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def _memory() -> float | None:
    """Bytes of this machine's memory."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal"))
