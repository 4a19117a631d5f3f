"""A block through PyTorch's variable-length flash attention: CUDA, bf16 and fp16."""

import torch

from penstock_kernels.attention.block.block_mask import Rectangle, Sees, unsupported_sizes
from penstock_kernels.attention.flash import unsupported_masks, unsupported_tensors


def unsupported_reason(
    q_QNH: torch.Tensor,
    k_SKH: torch.Tensor,
    v_SKH: torch.Tensor,
    sees: Sees,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> str | None:
    """bf16 and fp16 on CUDA only, without start rows and bidirectional runs."""
    del scale, window
    if soft_cap is not None:
        return f"scores are capped at {soft_cap}, and its blocks do not cap them"
    if not isinstance(sees, Rectangle) and (reason := unsupported_masks(sees)):
        return reason
    return unsupported_tensors(q_QNH, k_SKH, v_SKH) or unsupported_sizes(q_QNH, k_SKH, sees)


def block(
    q_QNH: torch.Tensor,
    k_SKH: torch.Tensor,
    v_SKH: torch.Tensor,
    sees: Sees,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same as the reference, in one call."""
    assert soft_cap is None, "refused"
    *bounds, causal, window_left, right = _limits(sees, window)
    y_QNH, lse_NQ, *_ = torch.ops.aten._flash_attention_forward(
        q_QNH,
        k_SKH,
        v_SKH,
        *bounds,
        0.0,  # dropout
        causal,
        False,  # debug mask
        scale=scale,
        window_size_left=window_left,
        window_size_right=right,
    )
    return y_QNH, lse_NQ.t()


def block_backward(
    dy_QNH: torch.Tensor,
    q_QNH: torch.Tensor,
    k_SKH: torch.Tensor,
    v_SKH: torch.Tensor,
    y_QNH: torch.Tensor,
    lse_QN: torch.Tensor,
    sees: Sees,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Same as the reference, in one call."""
    assert soft_cap is None, "refused"
    *bounds, causal, window_left, right = _limits(sees, window)
    # Without dropout the RNG state is never read.
    random_state = torch.zeros(2, dtype=torch.uint64, device=q_QNH.device)
    unused = torch.empty(0, device=q_QNH.device)
    # dy of a sum is expanded, and the kernel refuses features that are not next to each other.
    return torch.ops.aten._flash_attention_backward(
        dy_QNH.contiguous(),
        q_QNH,
        k_SKH,
        v_SKH,
        y_QNH,
        lse_QN.t().contiguous(),
        *bounds,
        0.0,  # dropout
        causal,
        random_state,
        unused,
        scale=scale,
        window_size_left=window_left,
        window_size_right=right,
    )


def _limits(
    sees: Sees, window: int | None
) -> tuple[torch.Tensor, torch.Tensor, int, int, bool, int, int]:
    """cu_seqlens and max lengths of queries and keys, causal flag, and window to left and right."""
    if isinstance(sees, Rectangle):
        bounds = sees.cu_queries, sees.cu_keys, sees.num_queries, sees.num_keys
        # From the diagonal that ends at the last query and the last key; -1 is all.
        window_left = -1 if sees.reach is None else sees.num_keys - sees.num_queries + sees.reach
        return *bounds, False, window_left, -1
    bounds = sees.cu_seqlens, sees.cu_seqlens, sees.max_length, sees.max_length
    narrowed = sees.effective_window(window)
    return *bounds, True, -1 if narrowed is None else narrowed - 1, 0
