"""attention through PyTorch's own variable-length flash attention: no padding, CUDA only."""

import inspect

import torch
from torch.nn.attention import varlen

from penstock_kernels.attention.segments import Segments

TAKES = frozenset(inspect.signature(varlen.varlen_attn).parameters)
"""What this build's varlen_attn takes: grouped heads and windows came later than the function."""

MULTIPLE = 8
"""Flash attention's kernels read heads in vectors of this many values."""
WIDEST = 256


def refuses(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    segments: Segments,
    scale: float,
) -> str | None:
    """bf16 and fp16 on CUDA alone."""
    del scale
    if reason := refuses_tensors(q_TNH, k_TKH, v_TKH):
        return reason
    if segments.num_tokens != q_TNH.shape[0]:
        return f"q holds {q_TNH.shape[0]} tokens and the documents {segments.num_tokens}"
    missing = {"window_size", "scale", "enable_gqa"} - TAKES
    if missing:
        return f"this PyTorch's varlen_attn does not take {', '.join(sorted(missing))}"
    return None


def refuses_tensors(q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> str | None:
    """What flash attention's kernels refuse, whatever the documents are."""
    if not all(part.is_cuda for part in (q_TNH, k_TKH, v_TKH)):
        return f"its tensors are on {q_TNH.device.type}, and it needs cuda"
    if q_TNH.dtype not in (torch.bfloat16, torch.float16):
        return f"its tensors are {q_TNH.dtype}, and it takes bfloat16 and float16"
    if q_TNH.shape[-1] % MULTIPLE or q_TNH.shape[-1] > WIDEST:
        return f"heads are {q_TNH.shape[-1]} wide; it takes multiples of {MULTIPLE} up to {WIDEST}"
    return None


def native(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    segments: Segments,
    scale: float,
) -> torch.Tensor:
    """Causal attention of each document to itself, in one call. Returns [T, N, H]."""
    y_TNH = varlen.varlen_attn(
        q_TNH,
        k_TKH,
        v_TKH,
        segments.cu_seqlens,
        segments.cu_seqlens,
        segments.max_length,
        segments.max_length,
        scale=scale,
        window_size=(-1, 0),  # all the past, none of the future
        enable_gqa=q_TNH.shape[1] != k_TKH.shape[1],
    )
    assert isinstance(y_TNH, torch.Tensor)
    return y_TNH
