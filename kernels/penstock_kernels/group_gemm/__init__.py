"""Group GEMM: rows sorted by group, each group multiplied by its own matrix.

The experts of an MoE layer are such groups. There is no host synchronization: group offsets are
computed on the device, from the counts.
"""

import torch

from penstock_kernels.group_gemm import loops as _loops
from penstock_kernels.group_gemm import native as _native
from penstock_kernels.group_gemm import quack as _quack
from penstock_kernels.group_gemm.reference import group_gemm as _reference
from penstock_kernels.group_gemm.shapes import unsupported_pairs, unsupported_shapes
from penstock_kernels.op import KernelImpl, Op, needs_cuda, triton_backend

__all__ = ["group_gemm"]


def _unsupported_reason(
    x_TK: torch.Tensor, weight_GNK: torch.Tensor, counts_G: torch.Tensor
) -> str | None:
    reason = unsupported_shapes(x_TK, weight_GNK, counts_G)
    return reason or needs_cuda(x_TK, weight_GNK, counts_G)


group_gemm = Op(
    "group_gemm",
    _reference,
    {
        "native": KernelImpl(_native.PRODUCTS.by_rows, _native.unsupported_reason),
        **triton_backend("group_gemm.triton:group_gemm", _unsupported_reason),
        "quack": KernelImpl(
            _quack.PRODUCTS.by_rows, _quack.unsupported_reason, missing_reason=_quack.MISSING
        ),
        "loops": KernelImpl(_loops.PRODUCTS.by_rows, unsupported_pairs),
    },
    reference_name="eager",
)
