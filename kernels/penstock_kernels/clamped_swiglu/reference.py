"""Definition of clamped_gate. The reference of every other implementation."""

import torch


def clamped_gate(both_T2F: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Return `gate * sigmoid(alpha * gate) * (up + 1)`, [T, F], in the input's dtype.

    T tokens, F features; gate and up are interleaved. Gate is clamped to at most `limit`, and up to
    between it and its negative (gpt-oss's activation).
    """
    gate_TF = both_T2F[..., 0::2].clamp(max=limit)
    up_TF = both_T2F[..., 1::2].clamp(min=-limit, max=limit)
    return (up_TF + 1) * (gate_TF * torch.sigmoid(gate_TF * alpha))
