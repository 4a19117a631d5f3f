"""Attention sinks: a learned logit of each head without a key.

It joins the softmax's denominator and adds nothing to the output, so that a
head can attend to nothing (Xiao et al. 2023, "Efficient Streaming Language Models with Attention
Sinks"; the learned form is gpt-oss's). With the log-sum-exp of the scores it is one multiplication
after attention without it; attention's own gradients, with the joint sum, stay correct.

T tokens, N query heads, H head width.
"""

import torch


def unsupported_sinks(q_TNH: torch.Tensor, sinks_N: torch.Tensor | None) -> str | None:
    """Reason if there is not one sink for each query head."""
    if sinks_N is None or sinks_N.shape == q_TNH.shape[1:2]:
        return None
    return f"there are sinks of shape {tuple(sinks_N.shape)} for {q_TNH.shape[1]} query heads"


def with_sinks(
    y_TNH: torch.Tensor, lse_TN: torch.Tensor, sinks_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp with the sinks among the scores, in their own dtypes."""
    joint_TN = torch.logaddexp(lse_TN, sinks_N.to(lse_TN.dtype))
    share_TN1 = (lse_TN - joint_TN).exp().unsqueeze(-1)
    return (y_TNH * share_TN1).to(y_TNH.dtype), joint_TN


def gradient_of_sinks(
    dy_TNH: torch.Tensor, y_TNH: torch.Tensor, lse_TN: torch.Tensor, sinks_N: torch.Tensor
) -> torch.Tensor:
    """The sinks' gradient [N], from the results of `with_sinks`.

    The gradient of a softmax with respect to a score is its weight times (the gradient of that
    weight, 0 here, minus the weighted mean of all weights' gradients, which is `dy . y`).
    """
    mean_TN = (dy_TNH.to(lse_TN.dtype) * y_TNH.to(lse_TN.dtype)).sum(-1)
    weight_TN = (sinks_N.to(lse_TN.dtype) - lse_TN).exp()
    return -(weight_TN * mean_TN).sum(0).to(sinks_N.dtype)
