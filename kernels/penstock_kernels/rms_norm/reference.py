"""Definition of rms_norm. The reference of every other implementation."""

import torch


def rms_norm(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, plus_one: bool = False
) -> torch.Tensor:
    """Return x / rms(x) * weight over the last dimension, in x's dtype. Any leading dimensions.

    Normalized in fp32, cast back, then scaled: Hugging Face's LlamaRMSNorm, except that a weight
    kept in another precision (fp32 masters under autocast) never raises the dtype of the result.
    With `plus_one` the factor is 1 + weight, and the result is rounded once: GemmaRMSNorm.
    """
    x = x_TD.float()
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if plus_one:
        return (normed * (1 + weight_D.float())).to(x_TD.dtype)
    return weight_D.to(x_TD.dtype) * normed.to(x_TD.dtype)


def add_rms_norm(
    x_TD: torch.Tensor,
    stream_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return stream + x, rounded to their dtype, and rms_norm of it."""
    sum_TD = stream_TD + x_TD
    return sum_TD, rms_norm(sum_TD, weight_D, eps, plus_one)
