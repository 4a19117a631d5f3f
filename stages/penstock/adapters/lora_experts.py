"""Low-rank adaptation of a layer's experts, all at once.

R rows, E experts. Beside each expert's matrix [N, K] are a first factor [r, K] and a second one
[N, r], as tensors [E, r, K] and [E, N, r], or without E where all experts share one. What a row
gains is (alpha / r) B A x by the factors of its own expert.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from penstock.adapters.names import ADAPTER, EACH, EXPERTS, Side
from penstock.models.decoder import Decoder
from penstock.models.layers.experts import Experts, Matrix
from penstock.models.layers.moe import MoE
from penstock_kernels.group_gemm import group_gemm

Form = Literal["each", "shared", "hybrid"]
"""Whose factors are whose: `each` expert has its own; one pair is `shared` by all; or the factor on
the side of the model's width is (`hybrid`): the first one of gate and up, the second one of down.
"""

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Shapes = Mapping[tuple[Side, Matrix], tuple[int, ...]]


def is_shared(form: Form, side: Side, matrix: Matrix) -> bool:
    """Whether all experts of a layer have this factor in common."""
    outer: Side = "lora_B" if matrix == "down_proj" else "lora_A"
    return form == "shared" or (form == "hybrid" and side == outer)


class Factors(nn.Module):
    """Some of the factors of a layer's experts, unfilled, fp32."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        super().__init__()
        self.lora_A = _unfilled(shapes, "lora_A", device)
        self.lora_B = _unfilled(shapes, "lora_B", device)

    def get(self, side: Side, matrix: Matrix) -> nn.Parameter | None:
        """The factor, if it is one of these."""
        return (self.lora_A if side == "lora_A" else self.lora_B).get(matrix)


class ExpertAdapter(Factors):
    """What is added to the products with experts' matrices, and the factors that each has alone."""

    def __init__(
        self,
        shapes: Shapes,
        device: torch.device,
        *,
        shared: Factors,
        scale: float,
        multiply: Multiply,
    ) -> None:
        """`shared`: the others; `multiply`: a grouped product that takes any rank."""
        super().__init__(shapes, device)
        # Not a child: experts may lie on some ranks each, and what they share is on all.
        self._shared = (shared,)
        self.scale, self.multiply = scale, multiply

    def forward(
        self, matrix: Matrix, x_RK: torch.Tensor, counts_E: torch.Tensor
    ) -> torch.Tensor | None:
        """[R, N], or None for a matrix that is not adapted. `counts_E` rows of each expert lie in
        order."""
        a, b = self.factor("lora_A", matrix), self.factor("lora_B", matrix)
        if a is None or b is None:
            return None
        # In the factors' dtype unless autocast, which does not know grouped products, says
        # otherwise: fp32 factors beside a bf16 weight keep their precision.
        device = x_RK.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else a.dtype
        inner_Rr = self._product(x_RK.to(dtype), a.to(dtype), counts_E)
        return self._product(inner_Rr, b.to(dtype), counts_E) * self.scale

    def factor(self, side: Side, matrix: Matrix) -> nn.Parameter | None:
        """The factor of each expert or of all, [E, r, K] or [E, N, r], or without E."""
        own = self.get(side, matrix)
        return self._shared[0].get(side, matrix) if own is None else own

    def _product(
        self, x_RK: torch.Tensor, factor: torch.Tensor, counts_E: torch.Tensor
    ) -> torch.Tensor:
        if factor.dim() == 2:
            return F.linear(x_RK, factor)
        return self.multiply(x_RK, factor, counts_E)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"scale={self.scale}"


def expert_layers(model: Decoder, name: str, experts: Experts) -> dict[str, str]:
    """A checkpoint's linear layers that the experts called `name` are, with `*` for the number of
    one, and what the model calls each."""
    config = model.config.experts
    assert config is not None
    names = config.names
    stored = f"{name.removesuffix(f'.mlp.{EXPERTS}')}.{names.block}.{EACH}"
    parts = {"gate_proj": names.gate, "up_proj": names.up, "down_proj": names.down}
    return {
        f"{stored}.{parts.get(matrix, matrix)}": f"{name}.{matrix}" for matrix in experts.matrices
    }


def adapt_experts(
    mixture: MoE, matrices: Sequence[Matrix], *, rank: int, scale: float, form: Form
) -> None:
    """Put unfilled factors beside these matrices of every expert, in place."""
    experts = mixture.experts
    own: dict[tuple[Side, Matrix], tuple[int, ...]] = {}
    shared: dict[tuple[Side, Matrix], tuple[int, ...]] = {}
    for matrix in matrices:
        outputs, inputs = experts.matrices[matrix]
        sides: dict[Side, tuple[int, int]] = {
            "lora_A": (rank, inputs),
            "lora_B": (outputs, rank),
        }
        for side, shape in sides.items():
            if is_shared(form, side, matrix):
                shared[side, matrix] = shape
            else:
                own[side, matrix] = (experts.num_experts, *shape)
    device = experts.down_proj.device
    in_common = Factors(shared, device)
    if shared:
        mixture.add_module(ADAPTER, in_common)
    # The kernel that was chosen for the experts may not take products as narrow as a rank.
    is_plain = experts.operations.group_gemm is group_gemm.reference
    experts.adapter = ExpertAdapter(
        own,
        device,
        shared=in_common,
        scale=scale,
        multiply=group_gemm.reference if is_plain else group_gemm,
    )


def _unfilled(shapes: Shapes, side: Side, device: torch.device) -> nn.ParameterDict:
    return nn.ParameterDict(
        {
            matrix: nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device))
            for (its_side, matrix), shape in shapes.items()
            if its_side == side
        }
    )
