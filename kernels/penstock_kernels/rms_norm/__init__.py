"""RMSNorm over the last dimension, with a weight; alone, or fused with a residual addition."""

from typing import Any

import torch

from penstock_kernels.op import KernelImpl, Op, needs_floats, tensors_need_cuda, triton_backend
from penstock_kernels.rms_norm import lean as _lean
from penstock_kernels.rms_norm.reference import add_rms_norm as _add_reference
from penstock_kernels.rms_norm.reference import rms_norm as _reference

__all__ = ["add_rms_norm", "rms_norm"]

# On Triton a row is in one program's registers; wider ones would spill kilobytes of them.
WIDEST = 16384


def _mismatch(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, plus_one: bool = False
) -> str | None:
    del plus_one
    if not x_TD.ndim or weight_D.shape != x_TD.shape[-1:]:
        return f"x is {tuple(x_TD.shape)} and its weight is {tuple(weight_D.shape)}"
    if not x_TD.shape[-1]:
        return "rows are 0 wide, and have no mean"
    if eps < 0:
        return f"eps is {eps}, and the root of a negative number would be taken"
    return needs_floats(x_TD, weight_D)


def _mismatch_of_sum(
    x_TD: torch.Tensor, stream_TD: torch.Tensor, *args: Any, **kwargs: Any
) -> str | None:
    if x_TD.shape != stream_TD.shape:
        return f"x is {tuple(x_TD.shape)} and the stream is {tuple(stream_TD.shape)}"
    if x_TD.dtype != stream_TD.dtype:
        return f"x is {x_TD.dtype} and the stream is {stream_TD.dtype}"
    return _mismatch(x_TD, *args, **kwargs)


def _too_wide(x_TD: torch.Tensor) -> str | None:
    if x_TD.shape[-1] > WIDEST:
        return f"rows are {x_TD.shape[-1]} wide, and it takes up to {WIDEST}"
    return None


# The device is checked first, because every norm on a CPU gets here.
def _unsupported_reason(x_TD: torch.Tensor, *args: Any, **kwargs: Any) -> str | None:
    misplaced = tensors_need_cuda(x_TD, *args, **kwargs)
    return misplaced or _mismatch(x_TD, *args, **kwargs) or _too_wide(x_TD)


def _unsupported_add(x_TD: torch.Tensor, *args: Any, **kwargs: Any) -> str | None:
    misplaced = tensors_need_cuda(x_TD, *args, **kwargs)
    return misplaced or _mismatch_of_sum(x_TD, *args, **kwargs) or _too_wide(x_TD)


rms_norm = Op(
    "rms_norm",
    _reference,
    {
        **triton_backend("rms_norm.triton:rms_norm", _unsupported_reason),
        "lean": KernelImpl(_lean.rms_norm, _mismatch),
    },
)
add_rms_norm = Op(
    "add_rms_norm",
    _add_reference,
    {
        **triton_backend("rms_norm.triton:add_rms_norm", _unsupported_add),
        "lean": KernelImpl(_lean.add_rms_norm, _mismatch_of_sum),
    },
)
