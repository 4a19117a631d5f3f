"""Steps in which float64 takes the place of float32, so that what rounding explains is gone."""

import sys
import types
from typing import Any, cast

import torch

from penstock.engine.distributed.tensor_parallel import REDUCE_DTYPES
from penstock.train.launch.job import Job
from tests.engine.traces import Trace, trace_here

PACKAGE = "penstock"
"""Not its kernels: they compute in the inputs' dtype where that is wider than float32, and take
others than they have tiles for to their references."""


class _Torch(types.ModuleType):
    """`torch`, whose float32 is float64.

    Only the code under test sees it: torch itself pickles a dtype by its name, and safetensors
    must read the bytes of a file as the float32 that they are.
    """

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def trace_in_float64(job: Job) -> Trace | None:
    """What `trace_here` says, in float64. For a process that ends with it: all modules of the
    package stay changed."""
    wide = _Torch("torch")
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == PACKAGE and getattr(module, "torch", None) is torch:
            vars(module)["torch"] = wide
    # Read where the module was imported.
    cast("dict[str | None, torch.dtype]", REDUCE_DTYPES)["fp32"] = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    return trace_here(job)
