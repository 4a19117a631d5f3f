"""group_gemm through PyTorch's own grouped matmul."""

import torch
import torch.nn.functional as F

from penstock_kernels.group_gemm import loops
from penstock_kernels.group_gemm.autograd import operators
from penstock_kernels.group_gemm.shapes import (
    unsupported_shapes,
    unsupported_widths,
    with_unit_stride,
)
from penstock_kernels.group_gemm.zeroing import zero_empty, zero_tail_rows

# CUDA capabilities for which PyTorch has a kernel. On others, and for other numbers than bfloat16,
# it fetches the offsets to the host and multiplies one group after another.
GENERATIONS = (9, 10)


def unsupported_reason(
    x_TK: torch.Tensor, weight_GNK: torch.Tensor, counts_G: torch.Tensor
) -> str | None:
    """Operands that PyTorch does not support, or that need a synchronization on a GPU."""
    reason = unsupported_shapes(x_TK, weight_GNK, counts_G)
    if reason := reason or unsupported_widths(x_TK, weight_GNK):
        return reason
    if x_TK.is_cuda:
        if x_TK.dtype != torch.bfloat16:
            return f"x is {x_TK.dtype}; on a GPU PyTorch has a grouped product of bfloat16 alone"
        if torch.version.hip is None:
            major, minor = torch.cuda.get_device_capability(x_TK.device)
            if major not in GENERATIONS:
                return (
                    f"the GPU has capability {major}.{minor}, and PyTorch has a grouped product "
                    f"for {' and '.join(f'{major}.x' for major in GENERATIONS)} alone"
                )
    return None


def _is_evened(x_TK: torch.Tensor) -> bool:
    return x_TK.device.type == "cpu" and x_TK.element_size() < torch.float32.itemsize


def _by_rows(x_TK: torch.Tensor, weight_GNK: torch.Tensor, counts_G: torch.Tensor) -> torch.Tensor:
    if not x_TK.shape[0]:
        return x_TK.new_zeros(0, weight_GNK.shape[1])
    if _is_evened(x_TK):
        return loops.padded_by_rows(x_TK, weight_GNK, counts_G)
    # `cumsum` of integers gives int64 by itself, and grouped_mm takes offsets in int32.
    ends_G = counts_G.cumsum(0, dtype=torch.int32)
    # A view: grouped_mm takes either memory layout of a matrix, if one stride is 1.
    weight_GKN = with_unit_stride(weight_GNK).mT
    # grouped_mm does not write rows past the last offset (torch 2.13).
    return zero_tail_rows(F.grouped_mm(x_TK.contiguous(), weight_GKN, offs=ends_G), ends_G)


def _of_groups(a_TM: torch.Tensor, b_TN: torch.Tensor, counts_G: torch.Tensor) -> torch.Tensor:
    if not a_TM.shape[0]:
        return a_TM.new_zeros(counts_G.shape[0], a_TM.shape[1], b_TN.shape[1])
    if _is_evened(a_TM):
        return loops.padded_of_groups(a_TM, b_TN, counts_G)
    ends_G = counts_G.cumsum(0, dtype=torch.int32)
    y_GMN = F.grouped_mm(a_TM.contiguous().mT, b_TN.contiguous(), offs=ends_G)
    return zero_empty(y_GMN, counts_G)


PRODUCTS = operators("native", _by_rows, _of_groups)
