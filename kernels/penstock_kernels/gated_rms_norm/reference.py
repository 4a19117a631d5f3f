"""Definition of gated_rms_norm. The reference of every other implementation."""

from typing import Literal

import torch

Activation = Literal["silu", "sigmoid"]


def gated_rms_norm(
    x_TD: torch.Tensor,
    gate_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    activation: Activation = "silu",
    norm_first: bool = True,
    groups: int = 1,
) -> torch.Tensor:
    """RMSNorm with weight, gated by the activation of `gate`, in x's dtype. Any leading dimensions.

    Each of `groups` equal parts of the last dimension is normalized alone. With `norm_first` the
    norm is gated (Gated DeltaNet, Kimi Delta Attention), else gated x is normalized (Mamba-2).
    Rounded where Hugging Face's Qwen3NextRMSNormGated and MambaRMSNormGated do, from fp32.
    """
    x = x_TD.float()
    gate = gate_TD.float()
    gate = torch.nn.functional.silu(gate) if activation == "silu" else gate.sigmoid()
    if not norm_first:
        x = x * gate
    parts = x.unflatten(-1, (groups, -1))
    normed = (parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
    y_TD = weight_D.to(x_TD.dtype) * normed.to(x_TD.dtype)
    return (y_TD * gate).to(x_TD.dtype) if norm_first else y_TD
