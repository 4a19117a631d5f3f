"""attention through PyTorch's scaled_dot_product_attention: one call per bucket of documents. On a
CPU, where its matmuls are slow, strips of queries are faster for all but short documents.
"""

# pyright: reportIncompatibleMethodOverride=false

from typing import Any

import torch
import torch.nn.functional as F

from penstock_kernels.attention.block import sdpa as block
from penstock_kernels.attention.cpu_strips import cpu_flash_attention, should_use
from penstock_kernels.attention.one_block import Block, attend, traced
from penstock_kernels.attention.segments import LengthBucket, VarlenMetadata
from penstock_kernels.attention.sinks import unsupported_sinks

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
    """Supports every device and all consistent shapes; windows, sinks, start rows
    and bidirectional runs where its block does. No soft cap.
    """
    if soft_cap is not None:
        return f"scores are capped at {soft_cap}, and PyTorch's fused kernels do not cap them"
    sizes = (q_TNH.shape[0], k_TKH.shape[0], v_TKH.shape[0], segments.num_tokens)
    if any(size != sizes[0] for size in sizes):
        return f"q, k, v and the documents hold different numbers of tokens: {sorted({*sizes})}"
    if reason := unsupported_sinks(q_TNH, sinks_N):
        return reason
    # No difference on a CPU, and the longest document's length would be a data-dependent size.
    if q_TNH.device.type == "cpu" or _is_plain(segments, window, sinks_N):
        return None
    return block.unsupported_reason(q_TNH, k_TKH, v_TKH, segments, scale, window)


def sdpa(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    segments: VarlenMetadata,
    scale: float,
    window: int | None = None,
    sinks_N: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Causal attention within each document, in one call per bucket. Returns [T, N, H].

    No work is quadratic across documents, and a bucket's padding is bounded (see segments).
    """
    assert soft_cap is None, "refused"
    if torch.compiler.is_compiling() and q_TNH.device.type == "cpu":
        return traced(q_TNH, k_TKH, v_TKH, segments, scale, window, sinks_N)
    if not _is_plain(segments, window, sinks_N):
        return attend(_BLOCK, q_TNH, k_TKH, v_TKH, segments, scale, window, sinks_N)
    return _by_buckets(q_TNH, k_TKH, v_TKH, segments, scale)


def _is_plain(segments: VarlenMetadata, window: int | None, sinks_N: torch.Tensor | None) -> bool:
    return (
        segments.effective_window(window) is None
        and segments.start_rows is None
        and segments.run_ends is None
        and sinks_N is None
    )


def _by_buckets(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    segments: VarlenMetadata,
    scale: float,
) -> torch.Tensor:
    layout = segments.layout
    if layout is None:
        return _attend(q_TNH, k_TKH, v_TKH, segments.buckets[0], scale)
    slots = [bucket.num_slots for bucket in segments.buckets]
    to, back = layout.token_of_slot, layout.slot_of_token
    q, k, v = (_ToSlots.apply(part, to, back).split(slots) for part in (q_TNH, k_TKH, v_TKH))
    rows = [
        _attend(q_SNH, k_SKH, v_SKH, bucket, scale)
        for q_SNH, k_SKH, v_SKH, bucket in zip(q, k, v, segments.buckets, strict=True)
    ]
    y_SNH = rows[0] if len(rows) == 1 else torch.cat(rows)
    return _ToTokens.apply(y_SNH, back, to, layout.is_padding)


def _attend(
    q_SNH: torch.Tensor,
    k_SKH: torch.Tensor,
    v_SKH: torch.Tensor,
    bucket: LengthBucket,
    scale: float,
) -> torch.Tensor:
    if should_use(q_SNH, k_SKH, bucket):
        return cpu_flash_attention(q_SNH, k_SKH, v_SKH, bucket, scale)
    if q_SNH.device.type == "cpu" and q_SNH.dtype in (torch.bfloat16, torch.float16):
        # On CPUs without matrix units for them the 16-bit kernels take 1 to 9 times as long as the
        # fp32 one. Autocast would turn the parts back.
        with torch.autocast("cpu", enabled=False):
            y_SNH = _attend(q_SNH.float(), k_SKH.float(), v_SKH.float(), bucket, scale)
        return y_SNH.to(q_SNH.dtype)
    q_BNLH, k_BKLH, v_BKLH = (
        part.unflatten(0, (bucket.num_documents, bucket.width)).transpose(1, 2)
        for part in (q_SNH, k_SKH, v_SKH)
    )
    grouped = q_BNLH.shape[1] != k_BKLH.shape[1]
    if grouped and q_BNLH.is_cuda and q_BNLH.dtype == torch.float32:
        # No fused CUDA kernel takes grouped heads in fp32; repeated ones avoid the quadratic memory
        # of the unfused path.
        group = q_BNLH.shape[1] // k_BKLH.shape[1]
        k_BKLH, v_BKLH = (part.repeat_interleave(group, dim=1) for part in (k_BKLH, v_BKLH))
        grouped = False
    y_BNLH = F.scaled_dot_product_attention(
        q_BNLH, k_BKLH, v_BKLH, is_causal=True, scale=scale, enable_gqa=grouped
    )
    return y_BNLH.transpose(1, 2).flatten(0, 1)


class _ToSlots(torch.autograd.Function):
    """Copy tokens into padded slots."""

    @staticmethod
    def forward(ctx: Any, x_TNH: torch.Tensor, to: torch.Tensor, back: torch.Tensor):
        ctx.save_for_backward(back)
        return x_TNH.index_select(0, to)

    @staticmethod
    def backward(ctx: Any, dy_SNH: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (back,) = ctx.saved_tensors
        # Autograd's own would scatter-add into zeros; gradients of padding are exactly zero, so a
        # copy is enough.
        return dy_SNH.index_select(0, back), None, None


class _ToTokens(torch.autograd.Function):
    """Copy slots back into tokens, dropping padding; padding's gradient is zero."""

    @staticmethod
    def forward(
        ctx: Any, y_SNH: torch.Tensor, to: torch.Tensor, back: torch.Tensor, padding: torch.Tensor
    ):
        ctx.save_for_backward(back, padding)
        return y_SNH.index_select(0, to)

    @staticmethod
    def backward(ctx: Any, dy_TNH: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        back, padding = ctx.saved_tensors
        dy_SNH = dy_TNH.index_select(0, back).masked_fill_(padding[:, None, None], 0)
        return dy_SNH, None, None, None
