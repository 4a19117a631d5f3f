"""Shares of a data sheet's rates that kernels reach, by class of operator.

Fitted by `python -m tests.bench.fit_roofline` to docs/benchmarks/gpu.json, steps and kernels of one
H200. Other devices are taken to reach the same shares.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

OperatorClass = Literal[
    "products",
    "head",
    "float8 products",
    "grouped products",
    "attention forward",
    "attention backward",
    "elementwise",
    "loss",
    "optimizer",
]

KERNEL_SECONDS = 3e-6
"""Least time of a kernel."""

ACHIEVED_LINK = 0.75
"""Share of link bandwidth that collectives of many megabytes reach. Not measured: gpu.json has
collectives of one rank only."""

COLLECTIVE_LATENCY = 15e-6
"""Time of a collective without data in one machine; twice that between machines. Not measured."""

HOST_COPY_BANDWIDTH = 25e9
"""Bytes per second between pinned host memory and the device (PCIe 4 x16). Not measured."""


@dataclass(frozen=True)
class Achieved:
    """Shares of peak FLOP/s and of memory bandwidth."""

    flops: float
    bandwidth: float
    source: str
    """Rows of gpu.json; for shares that no row tells apart, what the fit starts from."""


_STEPS = "fitted to `adapters`, `weights` and `experts`"
_BYTES = 0.635
"""Share of bandwidth of all but the optimizer, fitted to the steps; from 0.6, AdamW's."""

ACHIEVED: Mapping[OperatorClass, Achieved] = {
    "products": Achieved(
        0.712, _BYTES, f"{_STEPS}; from 0.736, the bf16 layer that `fp8` compares with"
    ),
    "head": Achieved(0.712, _BYTES, "as products: `loss` ran out of time"),
    "float8 products": Achieved(
        0.608, _BYTES, "gpu.md: three products by blocks in 4.8 ms; no step in float8"
    ),
    "grouped products": Achieved(0.334, _BYTES, f"{_STEPS}; `group_gemm` was not measured"),
    "attention forward": Achieved(
        0.192, _BYTES, f"{_STEPS}, documents of 800 tokens; `attention alone` was not measured"
    ),
    "attention backward": Achieved(0.192, _BYTES, "as forward: steps do not tell them apart"),
    "elementwise": Achieved(1.0, _BYTES, f"{_STEPS}; `elementwise` was not measured"),
    "loss": Achieved(1.0, _BYTES, "as elementwise: `loss` ran out of time"),
    "optimizer": Achieved(
        1.0, 0.591, "gpu.md: AdamW of 8.2 billion parameters in 40 ms, 0.66 of `environment`"
    ),
}


@dataclass(frozen=True)
class Work:
    """What a kernel has to do, in seconds at a data sheet's rates."""

    compute: float = 0.0
    traffic: float = 0.0

    def seconds(self, achieved: Achieved) -> float:
        """Seconds of a kernel of its own: the larger of compute and memory traffic."""
        return max(KERNEL_SECONDS, self.compute / achieved.flops, self.traffic / achieved.bandwidth)
