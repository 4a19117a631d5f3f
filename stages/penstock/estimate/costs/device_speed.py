"""Device speeds: FLOP/s, memory bandwidth and interconnect, measured or from data sheets.

No torch: `measure_machine.py` measures, in a separate process.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.core import env
from penstock.core.errors import ConfigError
from penstock.core.files import read_json, write_json
from penstock.core.machine.device_specs import DEVICES, Precision, find_device
from penstock.core.machine.gpus import gpu_names
from penstock.core.machine.linux import cpu_model, memory_bytes, proc_fields

if TYPE_CHECKING:  # importing it loads the model packages, which this does not need
    from penstock.estimate.costs.sharded_model import Kind

GB = 1e9

NETWORK_BANDWIDTH = 50 * GB
"""Bytes per second between machines, per accelerator: one 400 Gbit/s port each."""

DEVICES_PER_NODE = 8
"""Default number of accelerators per machine."""

BFLOAT16_UNITS = {"avx512_bf16", "amx_bf16", "bf16"}
"""CPU flags of bfloat16 instructions in /proc/cpuinfo, on x86-64 and Arm."""

ACHIEVED_SHARE: Mapping[Literal["measured", "tabled"], float] = {"measured": 0.55, "tabled": 0.5}
"""Achieved share of FLOP/s in a layer's matmuls: of measured square matmuls, and of data
sheet peaks, which no matmul reaches."""


@dataclass(frozen=True)
class Machine:
    """The device of one rank. Speeds are per second; None if unknown."""

    name: str
    kind: "Kind"
    speeds: Mapping[Precision, float]
    bandwidth: float | None
    """Memory bandwidth in bytes per second, read plus written."""
    source: Literal["measured", "tabled"] | None = None
    memory: float | None = None
    """Memory in bytes."""
    link: float = 10 * GB
    """Bytes per second to other devices of the same machine, in each direction."""
    ranks_per_node: int = DEVICES_PER_NODE
    """Ranks per machine."""

    def speed(self, width: int) -> float | None:
        """Achieved FLOP/s in layers, for a dtype of `width` bytes."""
        precisions: Mapping[int, Precision] = {1: "fp8", 2: "bf16", 4: "fp32"}
        peak = self.speeds.get(precisions[width])
        return peak * ACHIEVED_SHARE[self.source] if peak and self.source else None


def detect_machine(local_ranks: int) -> Machine:
    """The device of one rank on this machine, with `local_ranks` ranks."""
    if names := gpu_names():
        return find_machine(names[0], local=len(names))
    return build_cpu_machine(read_measurements().get(_cpu()), local_ranks)


def build_cpu_machine(measured: Mapping[str, Any] | None, local_ranks: int) -> Machine:
    """The CPUs and memory of this machine, divided among `local_ranks` ranks.

    `measured` are the measured speeds of the whole machine, if any.
    """
    total_memory = memory_bytes()
    memory = total_memory and total_memory / local_ranks
    if measured is None:
        return Machine(_cpu(), "cpu", {}, None, memory=memory, ranks_per_node=local_ranks)
    speeds: dict[Precision, float] = {
        "fp32": measured["fp32"] / local_ranks,
        "bf16": measured["bf16"] / local_ranks,
    }
    bandwidth = measured["bandwidth"] / local_ranks
    # Communication between ranks copies data several times in memory.
    link = bandwidth / 4
    return Machine(_cpu(), "cpu", speeds, bandwidth, "measured", memory, link, local_ranks)


def find_machine(name: str, *, local: int = DEVICES_PER_NODE) -> Machine:
    """An accelerator by name. Raises ConfigError for an unknown one."""
    device, measured = find_device(name), read_measurements().get(name)
    link = device.link if device else Machine.link
    if measured:
        speeds: dict[Precision, float] = {"fp32": measured["fp32"], "bf16": measured["bf16"]}
        memory = device.memory if device else measured.get("memory")
        bandwidth = measured["bandwidth"]
        return Machine(name, "cuda", speeds, bandwidth, "measured", memory, link, local)
    if device is None:
        raise ConfigError(
            f"{name} is not known, so neither is how fast it is.\n"
            f"  Known are {', '.join(sorted(DEVICES))}; on a machine that has it, penstock doctor "
            "--measure tells."
        )
    precisions: tuple[Precision, ...] = ("fp32", "bf16", "fp8")
    speeds = {precision: speed for precision in precisions if (speed := device.peak(precision))}
    return Machine(name, "cuda", speeds, device.bandwidth, "tabled", device.memory, link, local)


def read_measurements() -> Mapping[str, dict[str, Any]]:
    """All measurements stored by `remember`, by device name."""
    try:
        return read_json(_file())
    except (OSError, json.JSONDecodeError):
        return {}


def slow_bfloat16() -> str | None:
    """Warning if bfloat16 matmuls are slower than float32 on this CPU, else None.

    Decided by measurement, else by whether the CPU has bfloat16 instructions (AVX2-only CPUs do
    not). None on GPUs.
    """
    if gpu_names():
        return None
    measured = read_measurements().get(_cpu())
    if measured and measured["bf16"] >= measured["fp32"]:
        return None
    if measured:
        ratio = measured["fp32"] / measured["bf16"]
        slower = f"{ratio:.3g} x slower than float32 on this CPU (measured)"
    elif has_bfloat16_units():
        return None
    else:
        slower = "many times slower than float32 on this CPU, which has no units for it"
    return f"bfloat16 is {slower}; train.enable_mixed_precision: false trains in float32"


def has_bfloat16_units() -> bool:
    """Whether this machine computes in bfloat16: its GPUs, or a CPU whose flags include bfloat16
    instructions; True if there are no flags."""
    if gpu_names():
        return True
    fields = proc_fields("cpuinfo")
    flags = fields.get("flags", fields.get("Features"))
    return flags is None or bool(BFLOAT16_UNITS & set(flags.split()))


def remember(measurement: Mapping[str, Any]) -> str:
    """Store the measurements of this machine for later estimates; returns the device name."""
    name = measurement.get("name") or _cpu()
    write_json(_file(), {**read_measurements(), name: dict(measurement)})
    return name


def _file() -> Path:
    return env.cache_home() / "speeds.json"


def _cpu() -> str:
    """CPU model and number of cores, because speed depends on both."""
    return f"{cpu_model()} x {env.num_processors()}"
