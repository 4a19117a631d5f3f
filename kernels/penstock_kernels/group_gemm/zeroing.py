"""Zero memory that a library's grouped matmul leaves unwritten."""

from collections.abc import Mapping

import torch

from penstock_kernels.op import HAS_TRITON, KernelImpl, Op, needs_cuda


def _reference(y_RW: torch.Tensor, is_unwritten_R: torch.Tensor) -> torch.Tensor:
    """Zero, in place, the rows of y_RW that is_unwritten_R names; return y_RW."""
    return y_RW.masked_fill_(is_unwritten_R[:, None], 0)


def _unsupported_reason(y_RW: torch.Tensor, is_unwritten_R: torch.Tensor) -> str | None:
    if not y_RW.is_contiguous():
        return f"rows of {tuple(y_RW.shape)} lie {y_RW.stride()} apart; they must be contiguous"
    return needs_cuda(y_RW, is_unwritten_R)


_FAST: Mapping[str, KernelImpl[[torch.Tensor, torch.Tensor], torch.Tensor]] = {}
if HAS_TRITON:
    from penstock_kernels.group_gemm.zeroing_triton import zero_rows as _triton

    _FAST = {"triton": KernelImpl(_triton, _unsupported_reason, language="triton")}

zero_rows = Op("zero_rows", _reference, _FAST)


def zero_tail_rows(y_TN: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    """Zero, in place, the rows past the last group's end."""
    rows = torch.arange(y_TN.shape[0], device=y_TN.device)
    return zero_rows(y_TN, rows >= ends_G[-1])


def zero_empty(y_GMN: torch.Tensor, counts_G: torch.Tensor) -> torch.Tensor:
    """Zero, in place, the products of groups without rows.

    cuBLAS and CUTLASS leave them unwritten on some GPUs and not on others.
    """
    zero_rows(y_GMN.flatten(1), counts_G == 0)
    return y_GMN
