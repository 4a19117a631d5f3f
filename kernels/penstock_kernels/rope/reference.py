"""Definition of rope. The reference of every other implementation."""

from typing import Literal

import torch

Pairs = Literal["halves", "neighbours"]


def rope(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    pairs: Pairs = "halves",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their positions (RoPE). T tokens, N and K heads, H head width.

    The first R features of each head are rotated, R <= H (partial RoPE if R < H). With `halves`,
    feature i is paired with feature i + R/2 (Hugging Face's convention), with `neighbours` feature
    2i with 2i + 1 (interleaved, as in the RoFormer paper); cos and sin hold each of the R/2 angles
    twice, at both features of its pair. Computed in the wider of the dtypes; results have the
    dtypes of q and k.
    """
    cos_T1R, sin_T1R = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    return rotate(q_TNH, cos_T1R, sin_T1R, pairs), rotate(k_TKH, cos_T1R, sin_T1R, pairs)


def rotate(
    x_TNH: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor, pairs: Pairs
) -> torch.Tensor:
    """One rotated tensor, in its dtype."""
    width = cos_T1R.shape[-1]
    if width < x_TNH.shape[-1]:
        turned_TNR = rotate(x_TNH[..., :width], cos_T1R, sin_T1R, pairs)
        return torch.cat((turned_TNR, x_TNH[..., width:]), dim=-1)
    if pairs == "halves":
        first, second = x_TNH.chunk(2, dim=-1)
        other_TNH = torch.cat((-second, first), dim=-1)
    else:
        first, second = x_TNH[..., 0::2], x_TNH[..., 1::2]
        other_TNH = torch.stack((-second, first), dim=-1).flatten(-2)
    return (x_TNH * cos_T1R + other_TNH * sin_T1R).to(x_TNH.dtype)
