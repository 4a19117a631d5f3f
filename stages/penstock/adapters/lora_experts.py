"""LoRA on all experts of a layer at once.

R rows, E experts. Each expert's matrix [N, K] has A [r, K] and B [N, r], stored as tensors [E, r,
K] and [E, N, r], or without E where all experts share one. (alpha / r) B A dropout(x) of a row's
own expert is added to the row.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from penstock.adapters.lora import empty_lora_params
from penstock.adapters.names import ADAPTER, EACH, EXPERTS, Side
from penstock.models.causal_lm import CausalLM
from penstock.models.layers.dropout import RowDropout
from penstock.models.layers.experts import Experts, Matrix
from penstock.models.layers.moe import MoE
from penstock.models.weights import LAYERS
from penstock_kernels.group_gemm import group_gemm

ExpertSharing = Literal["each", "shared", "hybrid"]
"""Which LoRA parameters experts share. `each`: every expert has its own pair; `shared`: all experts
share one pair; `hybrid`: all share the matrix on the hidden-size side (A of gate and up, B of
down)."""

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Shapes = Mapping[tuple[Side, Matrix], tuple[int, ...]]


def is_shared(form: ExpertSharing, side: Side, matrix: Matrix) -> bool:
    """Whether all experts of a layer share this parameter."""
    outer: Side = "lora_B" if matrix == "down_proj" else "lora_A"
    return form == "shared" or (form == "hybrid" and side == outer)


class ExpertLoraParams(nn.Module):
    """Some of the LoRA parameters of a layer's experts, uninitialized, fp32."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        super().__init__()
        by_side: dict[Side, dict[str, tuple[int, ...]]] = {"lora_A": {}, "lora_B": {}}
        for (side, matrix), shape in shapes.items():
            by_side[side][matrix] = shape
        self.lora_A = empty_lora_params(by_side["lora_A"], device)
        self.lora_B = empty_lora_params(by_side["lora_B"], device)

    def get(self, side: Side, matrix: Matrix) -> nn.Parameter | None:
        """The parameter, or None if it is not one of these."""
        return (self.lora_A if side == "lora_A" else self.lora_B).get(matrix)


class ExpertAdapter(ExpertLoraParams):
    """Computes the LoRA output of the experts' matrices, and holds the parameters that experts do
    not share."""

    def __init__(
        self,
        shapes: Shapes,
        device: torch.device,
        *,
        shared: ExpertLoraParams,
        scale: float,
        multiply: Multiply,
        dropout: RowDropout | None,
    ) -> None:
        """`shared`: the shared parameters; `multiply`: a grouped GEMM that supports any rank;
        `dropout`: applied to the rows of each matrix."""
        super().__init__(shapes, device)
        # In a tuple, so that it is not a submodule: experts may be sharded over ranks, while their
        # shared parameters are replicated.
        self._shared = (shared,)
        # The experts have it as a submodule (`row_dropout`).
        self._dropout = (dropout,)
        self.scale, self.multiply = scale, multiply

    def forward(
        self, matrix: Matrix, x_RK: torch.Tensor, counts_E: torch.Tensor
    ) -> torch.Tensor | None:
        """[R, N], or None for a matrix without an adapter. Rows are sorted by expert; `counts_E` is
        the number of rows of each."""
        a, b = self.factor("lora_A", matrix), self.factor("lora_B", matrix)
        if a is None or b is None:
            return None
        # In the dtype of A and B unless autocast is on (it does not cover grouped GEMMs): fp32 LoRA
        # parameters beside a bf16 weight keep their precision.
        device = x_RK.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else a.dtype
        if (dropout := self._dropout[0]) is not None:
            x_RK = dropout.drop_rows(x_RK, matrix)
        inner_Rr = self._multiply(x_RK.to(dtype), a.to(dtype), counts_E)
        return self._multiply(inner_Rr, b.to(dtype), counts_E) * self.scale

    def factor(self, side: Side, matrix: Matrix) -> nn.Parameter | None:
        """The parameter of each expert or of all, [E, r, K] or [E, N, r], or without E."""
        per_expert = self.get(side, matrix)
        return self._shared[0].get(side, matrix) if per_expert is None else per_expert

    def _multiply(
        self, x_RK: torch.Tensor, factor: torch.Tensor, counts_E: torch.Tensor
    ) -> torch.Tensor:
        if factor.dim() == 2:
            return F.linear(x_RK, factor)
        return self.multiply(x_RK, factor, counts_E)

    def extra_repr(self) -> str:
        return f"scale={self.scale}"


def expert_layers(model: CausalLM, name: str, experts: Experts) -> dict[str, str]:
    """Maps checkpoint names of the linear layers of the experts called `name`, with `*` for the
    expert's number, to native names; none where experts have no adapters."""
    config = model.config.experts
    assert config is not None
    if not config.adaptable:
        return {}
    names = config.names
    layer = name.removesuffix(f".mlp.{EXPERTS}").removeprefix(LAYERS)
    stored = f"{model.config.names.backbone}.layers.{layer}.{names.block}.{EACH}"
    parts = {"gate_proj": names.gate, "up_proj": names.up, "down_proj": names.down}
    return {
        f"{stored}.{parts.get(matrix, matrix)}": f"{name}.{matrix}" for matrix in experts.matrices
    }


def adapt_experts(
    mixture: MoE,
    matrices: Sequence[Matrix],
    *,
    rank: int,
    scale: float,
    form: ExpertSharing,
    dropout: RowDropout | None = None,
) -> None:
    """Add uninitialized LoRA parameters to these matrices of every expert, in place."""
    experts = mixture.experts
    per_expert: dict[tuple[Side, Matrix], tuple[int, ...]] = {}
    shared: dict[tuple[Side, Matrix], tuple[int, ...]] = {}
    for matrix in matrices:
        outputs, inputs = experts.matrices[matrix]
        sides: dict[Side, tuple[int, int]] = {"lora_A": (rank, inputs), "lora_B": (outputs, rank)}
        for side, shape in sides.items():
            if is_shared(form, side, matrix):
                shared[side, matrix] = shape
            else:
                per_expert[side, matrix] = (experts.num_experts, *shape)
    device = experts.down_proj.device
    shared_params = ExpertLoraParams(shared, device)
    if shared:
        mixture.add_module(ADAPTER, shared_params)
    # The kernel selected for the experts may not support dimensions as small as a LoRA rank.
    is_plain = experts.operations.group_gemm is group_gemm.reference
    experts.adapter = ExpertAdapter(
        per_expert,
        device,
        shared=shared_params,
        scale=scale,
        multiply=group_gemm.reference if is_plain else group_gemm,
        dropout=dropout,
    )
    experts.row_dropout = dropout
