"""What clamped_gate means. The reference of every other implementation."""

import torch


def clamped_gate(both_T2F: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Return gate * sigmoid(alpha * gate) * (up + 1), [T, F], in the input's dtype.

    T tokens, F features, those of gate and up by turns. Gates above limit count as limit, and
    what they gate is kept between it and its negative (gpt-oss's activation).
    """
    gate_TF = both_T2F[..., 0::2].clamp(max=limit)
    up_TF = both_T2F[..., 1::2].clamp(min=-limit, max=limit)
    return (up_TF + 1) * (gate_TF * torch.sigmoid(gate_TF * alpha))
