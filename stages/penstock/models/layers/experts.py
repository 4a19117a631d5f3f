"""The experts of one layer: many small feed-forward networks, in two tensors.

R rows (a token for each expert it chose), E experts, D model width, F features of an expert.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import nn

from penstock.models.shape import ExpertsConfig
from penstock_kernels.group_gemm import group_gemm
from penstock_kernels.op import Op
from penstock_kernels.permute import Order, permute, unpermute
from penstock_kernels.swiglu import swiglu

P = ParamSpec("P")
R = TypeVar("R")

Implementation = Literal["auto", "eager", "native", "triton", "quack"]


@dataclass(frozen=True)
class ExpertOperations:
    """What a layer's experts are computed with: chosen once, when the model is built."""

    group_gemm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    permute: Callable[[torch.Tensor, Order], torch.Tensor]
    unpermute: Callable[[torch.Tensor, torch.Tensor, Order], torch.Tensor]
    activate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def operations_of(implementation: Implementation) -> ExpertOperations:
    """The operations of one implementation; `auto` takes for each the best that serves its inputs.

    A name stands for the products of experts. What sorts tokens has that backend as well or the
    best of its own; with `eager` all are the plain ones.

    Raises UnsupportedError for one that this machine's packages do not have.
    """

    def chosen(op: Op[P, R]) -> Callable[P, R]:
        if implementation == "eager":
            return op.reference
        return op.backend(implementation) if implementation in op.backends else op

    return ExpertOperations(
        group_gemm=group_gemm.backend(implementation),
        permute=chosen(permute),
        unpermute=chosen(unpermute),
        activate=chosen(swiglu),
    )


class Experts(nn.Module):
    """`down(silu(gate(x)) * up(x))`, each row with the matrices of its own expert.

    Dimension 0 of both parameters is experts, so that some of a layer's experts are rows of it.
    """

    def __init__(
        self, config: ExpertsConfig, hidden_size: int, *, operations: ExpertOperations
    ) -> None:
        super().__init__()
        experts, inner = config.num_experts, config.width
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden_size, inner))
        self.operations = operations

    def forward(self, x_RD: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """What each row's expert makes of it, [R, D]; `counts_E` rows of each lie in order."""
        multiply, dtype = self.operations.group_gemm, x_RD.dtype
        # Weights kept in fp32 beside autocast's hidden states are cast here: autocast itself does
        # not know grouped products.
        into_EFD, out_of_EDF = self.gate_up_proj.to(dtype), self.down_proj.to(dtype)
        gate_RF, up_RF = multiply(x_RD, into_EFD, counts_E).chunk(2, dim=-1)
        return multiply(self.operations.activate(gate_RF, up_RF), out_of_EDF, counts_E)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        experts, width, inner = self.down_proj.shape
        return f"{experts} x {width} -> {inner} -> {width}"
