"""attention through PyTorch's own variable-length flash attention, and through flex_attention
for unsupported cases: no padding, CUDA only.
"""

from collections.abc import Mapping
from typing import Any

import torch

from penstock_kernels.attention.block import native as block
from penstock_kernels.attention.flash import unsupported_inputs
from penstock_kernels.attention.flex import flex, unsupported_width
from penstock_kernels.attention.one_block import Block, attend
from penstock_kernels.attention.segments import VarlenMetadata

# torch.__version__ compares as versions do, where strings would put 2.9 after 2.12.
# Before PyTorch 2.12 varlen_attn has no such argument and accepts grouped heads as is.
ENABLE_GQA: Mapping[str, Any] = {"enable_gqa": True} if torch.__version__ >= "2.12" else {}

_BLOCK = Block(block.block, block.block_backward)


def unsupported_reason(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    segments: VarlenMetadata,
    scale: float,
    window: int | None = None,
    sinks_N: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> str | None:
    """bf16 and fp16 on CUDA only."""
    del scale, window
    if reason := unsupported_inputs(q_TNH, k_TKH, v_TKH, segments, sinks_N):
        return reason
    return unsupported_width(q_TNH) if _needs_flex(segments, soft_cap) else None


def native(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    segments: VarlenMetadata,
    scale: float,
    window: int | None = None,
    sinks_N: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Causal attention within each document, in one call. Returns [T, N, H]."""
    if _needs_flex(segments, soft_cap):
        return flex(q_TNH, k_TKH, v_TKH, segments, scale, window, sinks_N, soft_cap)
    if sinks_N is not None:
        return attend(_BLOCK, q_TNH, k_TKH, v_TKH, segments, scale, window, sinks_N)
    # Imported late: it imports the compiler, which takes a second.
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415

    y_TNH = varlen_attn(
        q_TNH,
        k_TKH,
        v_TKH,
        segments.cu_seqlens,
        segments.cu_seqlens,
        segments.max_length,
        segments.max_length,
        scale=scale,
        # The window to the left, or all of it; nothing to the right.
        window_size=(-1 if window is None else window - 1, 0),
        **ENABLE_GQA,
    )
    assert isinstance(y_TNH, torch.Tensor)
    return y_TNH


def _needs_flex(segments: VarlenMetadata, soft_cap: float | None) -> bool:
    masks = segments.start_rows, segments.run_ends
    return soft_cap is not None or any(mask is not None for mask in masks)
