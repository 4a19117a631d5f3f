"""Low-rank adaptation: a frozen linear layer plus a trained product of two narrow matrices.

T tokens; A is [r, in], B is [out, r]; y = W x + (alpha / r) B A x (Hu et al. 2021, no dropout).
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from penstock.adapters.names import factor_of
from penstock.models.initialise import generator_for


class LoraLinear(nn.Linear):
    """A linear layer whose own weight is frozen, with one pair of factors per adapted part.

    It takes the base layer's Parameters as they are, under the same names. A fused projection has
    several parts, of which only some may be adapted; a plain layer is its own single part.
    """

    def __init__(
        self,
        base: nn.Linear,
        *,
        parts: Mapping[str, int],
        adapted: Sequence[str],
        rank: int,
        alpha: float,
    ) -> None:
        """`parts`: output features of each part, in the order of the weight's rows."""
        super().__init__(
            base.in_features, base.out_features, bias=base.bias is not None, device="meta"
        )
        self.weight, self.bias = base.weight, base.bias
        self.requires_grad_(False)
        self.parts = dict(parts)
        self.rank, self.alpha = rank, alpha
        self.scale = alpha / rank
        device = base.weight.device
        shapes = {part: ((rank, base.in_features), (parts[part], rank)) for part in adapted}
        self.lora_A = nn.ParameterDict(
            {part: _unfilled(a, device) for part, (a, _) in shapes.items()}
        )
        self.lora_B = nn.ParameterDict(
            {part: _unfilled(b, device) for part, (_, b) in shapes.items()}
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The base layer's output plus each adapted part's product, in the base output's dtype."""
        y = super().forward(input)
        if len(self.parts) == 1:
            (part,) = self.parts
            return y + self._product(input, part).to(y.dtype)
        outputs = [
            rows + self._product(input, part).to(y.dtype) if part in self.lora_A else rows
            for part, rows in zip(
                self.parts, y.split(list(self.parts.values()), dim=-1), strict=True
            )
        ]
        return torch.cat(outputs, dim=-1)

    def _product(self, x: torch.Tensor, part: str) -> torch.Tensor:
        """In the factors' dtype unless autocast says otherwise: fp32 factors beside a bf16 weight
        keep their precision."""
        a, b = self.lora_A[part], self.lora_B[part]
        return F.linear(F.linear(x.to(a.dtype), a), b) * self.scale


def initial_lora(name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """The start of the factor with this native name, fp32 on the CPU.

    A is uniform in ±1/sqrt(in) (kaiming_uniform with a = sqrt 5, as PEFT has it), B is zeros, so
    that training starts at the base model. The generator is seeded by the checkpoint's name of the
    layer: fused or not, a layer starts alike.
    """
    factor = factor_of(name)
    assert factor is not None, f"{name} is not the name of a low-rank factor"
    with torch.device("cpu"):
        if factor.side == "lora_B":
            return torch.zeros(*shape, dtype=torch.float32)
        start = torch.empty(*shape, dtype=torch.float32)
        generator = generator_for(f"{factor.hf_module}.lora_A", seed)
        return nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)


def fill(model: nn.Module, seed: int) -> None:
    """Give every factor of the model, none of them on the meta device, its start, in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if factor_of(name) is not None:
                parameter.copy_(initial_lora(name, parameter.shape, seed))


def _unfilled(shape: tuple[int, int], device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device))
