"""Zero memory that a library's grouped matmul leaves unwritten."""

import torch

from penstock_kernels.op import Op, needs_cuda, triton_backend


def _zero_tail(y_TN: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(y_TN.shape[0], device=y_TN.device)
    return y_TN.masked_fill_((rows >= ends_G[-1])[:, None], 0)


def _zero_empty(y_GMN: torch.Tensor, counts_G: torch.Tensor) -> torch.Tensor:
    return y_GMN.masked_fill_((counts_G == 0)[:, None, None], 0)


def _unsupported_reason(y: torch.Tensor, numbers_G: torch.Tensor) -> str | None:
    if not y.is_contiguous():
        return f"rows of {tuple(y.shape)} lie {y.stride()} apart; they must be contiguous"
    return needs_cuda(y, numbers_G)


zero_tail_rows = Op(
    "zero_tail_rows",
    _zero_tail,
    triton_backend("group_gemm.zeroing_triton:zero_tail", _unsupported_reason),
)
"""Zero, in place, the rows of y_TN past the last of ends_G; returns y_TN."""

zero_empty = Op(
    "zero_empty",
    _zero_empty,
    triton_backend("group_gemm.zeroing_triton:zero_empty", _unsupported_reason),
)
"""Zero, in place, the products y_GMN of groups without rows, by counts_G; returns y_GMN.

cuBLAS and CUTLASS leave them unwritten on some GPUs and not on others.
"""
