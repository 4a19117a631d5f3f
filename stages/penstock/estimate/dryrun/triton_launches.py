"""Triton kernels in a dry run: launches are recorded with their grid, and not made."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from triton.runtime import jit
from triton.tools.tensor_descriptor import TensorDescriptor

from penstock.estimate.dryrun.fake_cuda import current_stream
from penstock.estimate.dryrun.roofline import Roofline
from penstock.estimate.dryrun.trace import Trace

# CUDA C++ Programming Guide, technical specifications by compute capability.
GRID_LIMITS = (2**31 - 1, 65_535, 65_535)
"""Largest grid of CUDA, by axis."""

MATMULS: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "_by_rows": lambda args: 2.0 * args["y_ptr"].numel() * args["K"],
    "_of_groups": lambda args: 2.0 * args["T"] * args["M"] * args["N"],
    "_multiply": lambda args: 2.0 * args["y_ptr"].numel() * args["K"],
    # One triangle of a symmetric product is computed.
    "_symmetric": lambda args: 1.0 * args["y_ptr"].numel() * args["K"],
}
"""FLOPs of the kernels that multiply matrices, by what they are given."""


def record_triton_launches(trace: Trace, roofline: Roofline, is_paused: Callable[[], bool]) -> None:
    """Replace `JITFunction.run` for the rest of this process."""

    def run(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
        # `warmup` compiles without a launch.
        if warmup or is_paused():
            return
        name = self.fn.__name__
        values = dict(zip(self.arg_names, args, strict=False)) | kwargs
        _check(trace, name, values, grid)
        flops = MATMULS[name](values) if name in MATMULS else 0.0
        work = roofline.triton(name, self.src, _operands(values), flops)
        trace.launch(current_stream().number, name, work, "triton")

    jit.JITFunction.run = run


def _operands(values: Mapping[str, Any]) -> dict[str, Any]:
    # A kernel may be given a tensor and its descriptor.
    pointers = {id(x) for x in values.values() if isinstance(x, torch.Tensor)}
    return {
        name: x.base if isinstance(x, TensorDescriptor) else x
        for name, x in values.items()
        if not (isinstance(x, TensorDescriptor) and id(x.base) in pointers)
    }


def _check(trace: Trace, name: str, values: Mapping[str, Any], grid: Any) -> None:
    for value in values.values():
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            trace.fault(f"Triton kernel {name} is given a host tensor")
    sizes: tuple[int, ...] = tuple(grid(values) if callable(grid) else grid)  # pyright: ignore[reportArgumentType]
    for size, limit in zip(sizes, GRID_LIMITS, strict=False):
        if not 0 < size <= limit:
            trace.fault(f"Triton kernel {name} is launched with grid {sizes}")
