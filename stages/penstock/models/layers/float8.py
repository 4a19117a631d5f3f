"""Linear layers whose products are of float8 numbers, and whose weights stay as they are.

T tokens, K features in, N out.
"""

import torch
from torch import nn

from penstock.models.layers.autocast import as_autocast
from penstock_kernels.float8 import ALONE, AmaxReduceGroups, Float8Recipe, linear


class Float8Product:
    """What multiplies for a layer: the socket `affine` of those that have one.

    `agreement` is a socket too, for whoever lets a layer have only some of its features or tokens.
    """

    def __init__(self, scheme: Float8Recipe) -> None:
        self.scheme = scheme
        self.agreement: AmaxReduceGroups = ALONE

    def __call__(
        self, x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x W^T + b`, in x's dtype, or autocast's where that is on."""
        y = linear(as_autocast(x), weight_NK, self.scheme, self.agreement)
        return y if bias_N is None else y + bias_N.to(y.dtype)


class Float8Linear(nn.Linear):
    """A linear layer with the parameters of another."""

    def __init__(self, base: nn.Linear, product: Float8Product) -> None:
        super().__init__(
            base.in_features, base.out_features, bias=base.bias is not None, device="meta"
        )
        self.weight, self.bias = base.weight, base.bias
        self.affine = product

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As the layer that it was made of, but for rounding."""
        return self.affine(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{super().extra_repr()}, float8 {self.affine.scheme.recipe}"
