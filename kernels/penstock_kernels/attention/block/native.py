"""A block through PyTorch's variable-length flash attention: CUDA, bf16 and fp16."""

import torch

from penstock_kernels.attention.block.rectangle import Rectangle, Sees, refuses_sizes
from penstock_kernels.attention.native import refuses_tensors


def refuses(
    q_QNH: torch.Tensor, k_SKH: torch.Tensor, v_SKH: torch.Tensor, sees: Sees, scale: float
) -> str | None:
    """bf16 and fp16 on CUDA alone."""
    del scale
    return refuses_tensors(q_QNH, k_SKH, v_SKH) or refuses_sizes(q_QNH, k_SKH, sees)


def refuses_backward(
    dy_QNH: torch.Tensor,
    q_QNH: torch.Tensor,
    k_SKH: torch.Tensor,
    v_SKH: torch.Tensor,
    y_QNH: torch.Tensor,
    lse_QN: torch.Tensor,
    sees: Sees,
    scale: float,
) -> str | None:
    """What the forward pass refuses."""
    del dy_QNH, y_QNH, lse_QN
    return refuses(q_QNH, k_SKH, v_SKH, sees, scale)


def block(
    q_QNH: torch.Tensor, k_SKH: torch.Tensor, v_SKH: torch.Tensor, sees: Sees, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference's, in one call."""
    *bounds, causal, left, right = _limits(sees)
    y_QNH, lse_NQ, *_ = torch.ops.aten._flash_attention_forward(
        q_QNH,
        k_SKH,
        v_SKH,
        *bounds,
        0.0,  # dropout
        causal,
        False,  # a mask to debug with
        scale=scale,
        window_size_left=left,
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the reference's, in one call."""
    *bounds, causal, left, right = _limits(sees)
    # Without dropout the state of the random numbers is never read.
    random_state = torch.zeros(2, dtype=torch.uint64, device=q_QNH.device)
    unused = torch.empty(0, device=q_QNH.device)
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
        window_size_left=left,
        window_size_right=right,
    )


def _limits(
    sees: Sees,
) -> tuple[torch.Tensor, torch.Tensor, int, int, bool, int, int]:
    """Bounds and longest of queries and keys, whether causal, and the window to left and right."""
    if isinstance(sees, Rectangle):
        bounds = sees.cu_queries, sees.cu_keys, sees.num_queries, sees.num_keys
        return *bounds, False, -1, -1
    bounds = sees.cu_seqlens, sees.cu_seqlens, sees.max_length, sees.max_length
    return *bounds, True, -1, 0
