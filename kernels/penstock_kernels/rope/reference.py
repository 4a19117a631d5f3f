"""What rope means. Obvious, and the judge of every other implementation."""

import torch


def rope(
    q_TNH: torch.Tensor, k_TKH: torch.Tensor, cos_TH: torch.Tensor, sin_TH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their positions. T tokens, N and K heads, H head width.

    Feature i is paired with feature i + H/2 (Hugging Face's convention, not the interleaved one of
    the RoFormer paper), so cos and sin hold each of the H/2 angles twice. The result has q's and
    k's dtype when cos and sin have it too.
    """
    cos_T1H, sin_T1H = cos_TH.unsqueeze(1), sin_TH.unsqueeze(1)
    return (
        q_TNH * cos_T1H + _half_turned(q_TNH) * sin_T1H,
        k_TKH * cos_T1H + _half_turned(k_TKH) * sin_T1H,
    )


def _half_turned(x_TNH: torch.Tensor) -> torch.Tensor:
    first, second = x_TNH.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
