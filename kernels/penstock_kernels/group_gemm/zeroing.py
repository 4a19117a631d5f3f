"""Zero memory that a library's grouped matmul leaves unwritten."""

from collections.abc import Mapping

import torch

from penstock_kernels.op import HAS_TRITON, KernelImpl, Op, needs_cuda


def _zero_tail(y_TN: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(y_TN.shape[0], device=y_TN.device)
    return y_TN.masked_fill_((rows >= ends_G[-1])[:, None], 0)


def _zero_empty(y_GMN: torch.Tensor, counts_G: torch.Tensor) -> torch.Tensor:
    return y_GMN.masked_fill_((counts_G == 0)[:, None, None], 0)


def _unsupported_reason(y: torch.Tensor, numbers_G: torch.Tensor) -> str | None:
    if not y.is_contiguous():
        return f"rows of {tuple(y.shape)} lie {y.stride()} apart; they must be contiguous"
    return needs_cuda(y, numbers_G)


_TAIL: Mapping[str, KernelImpl[[torch.Tensor, torch.Tensor], torch.Tensor]] = {}
_EMPTY: Mapping[str, KernelImpl[[torch.Tensor, torch.Tensor], torch.Tensor]] = {}
if HAS_TRITON:
    from penstock_kernels.group_gemm import zeroing_triton

    _TAIL = {"triton": KernelImpl(zeroing_triton.zero_tail, _unsupported_reason, "triton")}
    _EMPTY = {"triton": KernelImpl(zeroing_triton.zero_empty, _unsupported_reason, "triton")}

zero_tail_rows = Op("zero_tail_rows", _zero_tail, _TAIL)
"""Zero, in place, the rows of y_TN past the last of ends_G; returns y_TN."""

zero_empty = Op("zero_empty", _zero_empty, _EMPTY)
"""Zero, in place, the products y_GMN of groups without rows, by counts_G; returns y_GMN.

cuBLAS and CUTLASS leave them unwritten on some GPUs and not on others.
"""
