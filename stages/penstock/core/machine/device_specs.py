"""Accelerator specifications from vendor data sheets: peak FLOP/s, memory, bandwidth.

Peak FLOP/s are dense: figures quoted with 2:4 sparsity are divided by two. Figures for 16 and 8
bits are with fp32 accumulation, which GeForce cards run at half rate. Device names are matched as a
whole, so that similarly named cards are not confused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Precision = Literal["fp32", "bf16", "fp16", "fp8"]

TERA = 1e12
GB = 1e9

_VENDOR_WORDS = {"nvidia", "amd", "tesla", "instinct", "geforce", "corporation"}
_FORM_FACTOR_WORDS = re.compile(r"\d+gb|sxm\d?|hbm\d?e?|oam")
"""Words that do not identify a different chip: memory size, memory type, and form factor."""


@dataclass(frozen=True)
class Device:
    """One accelerator. Rates are per second."""

    bf16: float | None  # FLOP/s in bf16 and fp16; None if bf16 is not supported
    fp32: float  # FLOP/s in fp32 without TF32
    fp8: float | None  # FLOP/s in FP8; None if FP8 matmuls are not supported
    memory: float  # Device memory in bytes
    bandwidth: float  # Memory bandwidth in bytes
    link: float
    """Interconnect bandwidth in bytes to the other accelerators of the machine, per direction."""
    fp16: float | None = None  # FLOP/s in fp16 if different from bf16

    def peak(self, precision: Precision) -> float | None:
        if precision == "fp16":
            return self.fp16 or self.bf16
        return getattr(self, precision)


def _device(
    bf16: float | None,
    fp32: float,
    fp8: float | None,
    memory: float,
    bandwidth: float,
    link: float,
    *,
    fp16: float | None = None,
) -> Device:
    """Build a Device from TFLOP/s, GB and GB/s."""
    scaled = [None if value is None else value * TERA for value in (bf16, fp32, fp8, fp16)]
    return Device(
        scaled[0], fp32 * TERA, scaled[2], memory * GB, bandwidth * GB, link * GB, fp16=scaled[3]
    )


# GB/s of 16 lanes, per direction.
_PCIE4, _PCIE5 = 32, 64

DEVICES: Mapping[str, Device] = {
    "b300": _device(2250, 75, 4500, 288, 8000, 900),
    "gb300": _device(2500, 80, 5000, 288, 8000, 900),
    "b200": _device(2250, 75, 4500, 180, 7700, 900),
    "gb200": _device(2500, 80, 5000, 186, 8000, 900),
    "h200": _device(989.4, 66.9, 1978.9, 141, 4800, 450),
    "h200 nvl": _device(835.5, 60, 1671, 141, 4800, 450),
    "gh200": _device(989.4, 66.9, 1978.9, 96, 4000, 450),
    "h100": _device(989.4, 66.9, 1978.9, 80, 3350, 450),
    "h100 nvl": _device(835.5, 60, 1671, 94, 3900, 300),
    "h100 pcie": _device(756, 51.2, 1513, 80, 2000, _PCIE5),
    "h800": _device(989.4, 66.9, 1978.9, 80, 3350, 200),
    "h20": _device(148, 44, 296, 96, 4000, 450),
    "a100": _device(312, 19.5, None, 80, 2039, 300),
    "a100 40gb": _device(312, 19.5, None, 40, 1555, 300),
    "a100 pcie": _device(312, 19.5, None, 80, 1935, _PCIE4),
    "a100 pcie 40gb": _device(312, 19.5, None, 40, 1555, _PCIE4),
    "a800": _device(312, 19.5, None, 80, 2039, 200),
    "a40": _device(149.7, 37.4, None, 48, 696, _PCIE4),
    "a30": _device(165, 10.3, None, 24, 933, _PCIE4),
    "a10": _device(125, 31.2, None, 24, 600, _PCIE4),
    "l40s": _device(362, 91.6, 733, 48, 864, _PCIE4),
    "l40": _device(181, 90.5, 362, 48, 864, _PCIE4),
    "l4": _device(121, 30.3, 242.5, 24, 300, _PCIE4),
    "rtx a6000": _device(154.8, 38.7, None, 48, 768, _PCIE4),
    "rtx 6000 ada generation": _device(364.2, 91.1, 728.5, 48, 960, _PCIE4),
    "rtx 5090": _device(209.5, 104.8, 419, 32, 1792, _PCIE5),
    "rtx 4090": _device(165.2, 82.6, 330.3, 24, 1008, _PCIE4),
    "rtx 3090": _device(71, 35.6, None, 24, 936, _PCIE4),
    "v100": _device(None, 15.7, None, 32, 900, 150, fp16=125),
    "t4": _device(None, 8.1, None, 16, 320, 16, fp16=65),
    "mi300x": _device(1307.4, 163.4, 2614.9, 192, 5300, 448),
    "mi325x": _device(1307.4, 163.4, 2614.9, 256, 6000, 448),
}


def find_device(name: str) -> Device | None:
    """Look up an accelerator by its driver name or short name; None if unknown.

    `NVIDIA A100-SXM4-40GB`, `A100 40GB` and `a100-40gb` are the same device. So are `H200` and
    `NVIDIA H200`; `H200 NVL` is a different device, and a MIG slice is unknown.
    """
    name_parts = [
        part for part in re.split(r"[^a-z0-9]+", name.lower()) if part not in _VENDOR_WORDS
    ]
    plain = " ".join(part for part in name_parts if part and not _FORM_FACTOR_WORDS.fullmatch(part))
    sizes = [part for part in name_parts if re.fullmatch(r"\d+gb", part)]
    device = DEVICES.get(" ".join([plain, *sizes])) or DEVICES.get(plain)
    if not device or not sizes:
        return device
    # Some cards have less memory than the usual model; some names include unusable memory.
    return replace(device, memory=min(device.memory, int(sizes[0][:-2]) * GB))


def peak_flops(name: str, precision: Precision) -> float | None:
    """Peak FLOP/s of the accelerator of that name, or None if unknown."""
    device = find_device(name)
    return device.peak(precision) if device else None
