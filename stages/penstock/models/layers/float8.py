"""FP8 linear layers. Matmuls are in FP8; parameters keep their dtype.

T tokens, K features in, N out.
"""

import torch
from torch import nn

from penstock.models.layers.autocast import as_autocast
from penstock_kernels.float8 import ALONE, AmaxReduceGroups, Float8Recipe, linear


class Float8Matmul:
    """FP8 matmul of a linear layer, assigned to the layer's `affine` hook.

    `agreement` has the process groups that all-reduce amax where tokens or features are sharded.
    """

    def __init__(self, scheme: Float8Recipe) -> None:
        self.scheme = scheme
        self.agreement: AmaxReduceGroups = ALONE

    def __call__(
        self, x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x W^T + b`, in the autocast dtype if autocast is enabled, otherwise in x's dtype."""
        y = linear(as_autocast(x), weight_NK, self.scheme, self.agreement)
        return y if bias_N is None else y + bias_N.to(y.dtype)


class Float8Linear(nn.Linear):
    """A linear layer that takes over the parameters of `base`."""

    def __init__(self, base: nn.Linear, product: Float8Matmul) -> None:
        # On the meta device: the weight that nn.Linear makes is replaced at once.
        super().__init__(
            base.in_features, base.out_features, bias=base.bias is not None, device="meta"
        )
        # The base's own Parameters: optimizers and tied weights keep their identity.
        self.weight, self.bias = base.weight, base.bias
        self.affine = product

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.affine(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, float8 {self.affine.scheme.recipe}"
