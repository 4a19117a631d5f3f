"""Full logits in fp32, with gradients that are rounded once.

PyTorch gives a product's output and its gradient one dtype. In bf16 the gradients of a mean's
logits, such as (probability - 1) / 513, would be rounded as if 1/513 were 1/512. So logits are
fp32, and their gradient is divided by its maximum, rounded, and multiplied by that maximum in fp32
after the matmul.
"""

from collections.abc import Sequence
from typing import Any

import torch

from penstock_kernels.cross_entropy.gradients import largest
from penstock_kernels.cross_entropy.sides import (
    Product,
    SideGradients,
    computed,
    precise,
    seen_by_autograd,
)

ALL = slice(None)


def linear_logits(products: Sequence[Product]) -> torch.Tensor:
    """The sum of products `x_i @ w_i.T`, [S, V], in fp32 (fp64 of fp64).

    Products are computed and rounded in the dtype of the first's rows, to which everything else is
    cast.
    """
    return _Logits.apply(*seen_by_autograd(products))


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *sides: torch.Tensor) -> torch.Tensor:
        first_SK, first_VK = sides[:2]
        logits_SV = first_SK.new_empty(len(first_SK), len(first_VK))
        with torch.autocast(first_SK.device.type, enabled=False):
            computed(sides).multiplied(ALL, logits_SV)
        ctx.save_for_backward(*sides)
        return logits_SV.to(precise(first_SK))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sides = ctx.saved_tensors
        dtype = sides[0].dtype
        scale = largest(grads[0]) if dtype != grads[0].dtype else 1.0
        gradients = SideGradients(ctx.needs_input_grad, sides, 1, scale)
        slope_SV = (grads[0] / scale).to(dtype)
        gradients.add(ALL, slope_SV, computed(sides))
        return tuple(gradients.take())
