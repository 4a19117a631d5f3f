"""rope with half as many PyTorch operations: queries and keys are rotated together.

This copies both, which is cheap compared with the calls for few tokens, as in generation.
"""

import torch

from penstock_kernels.rope.reference import Pairs, rotate

MOST = 256
"""Tokens."""


def unsupported_reason(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    pairs: Pairs = "halves",
) -> str | None:
    """Why the reference is faster."""
    del cos_TR, sin_TR, pairs
    if len(q_TNH) > MOST:
        return f"there are {len(q_TNH)} tokens, and a copy of more than {MOST} costs too much"
    if q_TNH.dtype != k_TKH.dtype or q_TNH.shape[2] != k_TKH.shape[2]:
        return f"q is {q_TNH.dtype} {[*q_TNH.shape]} and k is {k_TKH.dtype} {[*k_TKH.shape]}"
    return None


def rope(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    pairs: Pairs = "halves",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bitwise identical to the reference."""
    qk = torch.cat((q_TNH, k_TKH), dim=1)
    qk = rotate(qk, cos_TR.unsqueeze(1), sin_TR.unsqueeze(1), pairs)
    heads = q_TNH.shape[1]
    return qk[:, :heads], qk[:, heads:]
