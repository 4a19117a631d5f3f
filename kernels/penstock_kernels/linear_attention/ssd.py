"""Mamba-2's state-space model as linear attention without the delta rule.

T tokens, N heads P wide, G groups of B and C, S the width of a state.
"""

from collections.abc import Callable
from typing import Any

import torch

from penstock_kernels.attention.segments import VarlenMetadata


def ssd(
    linear_attention: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    x_TNP: torch.Tensor,
    dt_TN: torch.Tensor,
    A_N: torch.Tensor,
    B_TGS: torch.Tensor,
    C_TGS: torch.Tensor,
    segments: VarlenMetadata,
    D_N: torch.Tensor | None = None,
    initial_state_BNSP: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = exp(dt A) h + dt B x, and y = C h + D x (https://arxiv.org/abs/2405.21060).

    Args:
        linear_attention: the operation, or one of its backends.
        dt_TN: step sizes, after their softplus; fp32.
        A_N: below 0; fp32.

    Returns:
        Outputs [T, N, P], and each document's last state, [B, N, S, P].
    """
    # dt is in fp32, and kernels take values in the dtype of queries and keys.
    scaled_TNP = (x_TNP * dt_TN.unsqueeze(-1)).to(x_TNP.dtype)
    inputs: tuple[Any, ...] = (C_TGS, B_TGS, scaled_TNP, dt_TN * A_N, None, segments, 1.0)
    y_TNP, state_BNSP = linear_attention(*inputs, initial_state_BNSP)
    if D_N is not None:
        y_TNP = (y_TNP + x_TNP * D_N.unsqueeze(-1)).to(x_TNP.dtype)
    return y_TNP, state_BNSP
