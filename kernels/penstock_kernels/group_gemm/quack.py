"""group_gemm through QuACK's kernels for Hopper and Blackwell, an optional package."""

# pyright: reportMissingImports=false

from importlib.metadata import PackageNotFoundError, version

import torch

from penstock_kernels.group_gemm.autograd import operators
from penstock_kernels.group_gemm.shapes import (
    unsupported_shapes,
    unsupported_widths,
    with_unit_stride,
)
from penstock_kernels.group_gemm.zeroing import zero_tail_rows

OLDEST = 9
"""Minimum CUDA capability for QuACK's group GEMM here."""


MISSING: str | None = None
"""Why QuACK is not available, or None if it is."""

# By its PyPI name: other packages may be imported as `quack` too.
try:
    version("quack-kernels")
except PackageNotFoundError:
    MISSING = "its package is not installed; install it with `pip install quack-kernels`"


def unsupported_reason(
    x_TK: torch.Tensor, weight_GNK: torch.Tensor, counts_G: torch.Tensor
) -> str | None:
    """No Hopper GPU, or unsupported operands."""
    if reason := unsupported_shapes(x_TK, weight_GNK, counts_G):
        return reason
    if x_TK.dtype not in (torch.bfloat16, torch.float16):
        return f"x is {x_TK.dtype}, and it takes bfloat16 and float16"
    if reason := unsupported_widths(x_TK, weight_GNK):
        return reason
    if not x_TK.is_cuda or torch.version.hip is not None:
        return f"its tensors are on {x_TK.device.type}, and it needs a GPU of NVIDIA's"
    major, minor = torch.cuda.get_device_capability(x_TK.device)
    if major < OLDEST:
        return f"the GPU has capability {major}.{minor}, and it needs {OLDEST}.0 or later"
    return None


def _bounds(counts_G: torch.Tensor) -> torch.Tensor:
    """Offsets of groups: 0, then every group's end, int32 [G + 1]."""
    return torch.nn.functional.pad(counts_G.cumsum(0, dtype=torch.int32), (1, 0))


def _by_rows(x_TK: torch.Tensor, weight_GNK: torch.Tensor, counts_G: torch.Tensor) -> torch.Tensor:
    # Importing it compiles and queries the GPU: not before this process has selected one.
    from quack.gemm_interface import gemm  # noqa: PLC0415

    if not x_TK.shape[0]:
        return x_TK.new_zeros(0, weight_GNK.shape[1])
    bounds = _bounds(counts_G)
    weight_GKN = with_unit_stride(weight_GNK).mT
    # Untuned: its tuner would measure for every number of rows, that is at every step.
    y_TN = gemm(x_TK.contiguous(), weight_GKN, cu_seqlens_m=bounds, tuned=False)
    return zero_tail_rows(y_TN, bounds)


def _of_groups(a_TM: torch.Tensor, b_TN: torch.Tensor, counts_G: torch.Tensor) -> torch.Tensor:
    from quack.gemm_interface import gemm  # noqa: PLC0415

    if not a_TM.shape[0]:
        return a_TM.new_zeros(counts_G.shape[0], a_TM.shape[1], b_TN.shape[1])
    return gemm(
        a_TM.contiguous().mT, b_TN.contiguous(), cu_seqlens_k=_bounds(counts_G), tuned=False
    )


PRODUCTS = operators("quack", _by_rows, _of_groups)
