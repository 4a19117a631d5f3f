"""Making adapters part of the weights they adapt."""

import torch


def merged(
    weight: torch.Tensor, lora_A: torch.Tensor, lora_B: torch.Tensor, scale: float
) -> torch.Tensor:
    """`weight + scale * B A`, computed in fp32 and rounded once, to the weight's dtype.

    weight [out, in], lora_A [r, in], lora_B [out, r]; scale is alpha / r.
    """
    product = lora_B.float() @ lora_A.float()
    return (weight.float() + scale * product).to(weight.dtype)
