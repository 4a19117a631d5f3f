"""The experts of one layer: many small feed-forward networks, in two tensors.

R rows (a token for each expert it chose), E experts, D model width, F features of an expert.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, ParamSpec, Protocol, TypeVar

import torch
from torch import nn

from penstock.models.decoder_config import ExpertsConfig
from penstock.models.layers.quantized_linear import QuantisedMatrix
from penstock_kernels.clamped_swiglu import clamped_gate
from penstock_kernels.glu import swiglu
from penstock_kernels.group_gemm import group_gemm
from penstock_kernels.op import Op
from penstock_kernels.permute import Order, permute, unpermute

P = ParamSpec("P")
R = TypeVar("R")

Implementation = Literal["auto", "eager", "native", "triton", "quack"]

Matrix = Literal["gate_proj", "up_proj", "gate_up_proj", "down_proj"]
"""One of an expert's, in this project's words for it."""


@dataclass(frozen=True)
class ExpertOperations:
    """What a layer's experts are computed with: chosen once, when the model is built."""

    group_gemm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    permute: Callable[[torch.Tensor, Order], torch.Tensor]
    unpermute: Callable[[torch.Tensor, torch.Tensor, Order], torch.Tensor]
    activate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    clamped_gate: Callable[[torch.Tensor, float, float], torch.Tensor]


def select_expert_ops(implementation: Implementation) -> ExpertOperations:
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
        clamped_gate=chosen(clamped_gate),
    )


class RunExperts(Protocol):
    """A way to call the two halves of experts, `gated` and `down`, one after the other."""

    def __call__(
        self, experts: "Experts", x_RD: torch.Tensor, counts_E: torch.Tensor, /
    ) -> torch.Tensor: ...


def call_experts(experts: "Experts", x_RD: torch.Tensor, counts_E: torch.Tensor, /) -> torch.Tensor:
    """Call them."""
    return experts.down(experts.gated(x_RD, counts_E), counts_E)


class Experts(nn.Module):
    """`down(silu(gate(x)) * up(x))`, each row with the matrices of its own expert.

    Dimension 0 of both parameters is experts, so that some of a layer's experts are rows of it.
    `run` is a socket: whoever assembles the model may have what lies between the halves computed
    again in the backward pass. So is `adapter`: called with a matrix's name, its input and the
    counts, it gives what is added to the product, or None.
    """

    def __init__(
        self, config: ExpertsConfig, hidden_size: int, *, operations: ExpertOperations
    ) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self._add_parameters(config.num_experts, config.width, hidden_size)
        self.operations = operations
        self.run: RunExperts = call_experts
        self.adapter: nn.Module | None = None

    def _add_parameters(self, experts: int, inner: int, hidden_size: int) -> None:
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden_size, inner))

    @property
    def matrices(self) -> Mapping[Matrix, tuple[int, int]]:
        """Output and input features of each of an expert's matrices."""
        _, width, inner = self.down_proj.shape
        return {
            "gate_proj": (inner, width),
            "up_proj": (inner, width),
            "down_proj": (width, inner),
        }

    def forward(self, x_RD: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """What each row's expert makes of it, [R, D]; `counts_E` rows of each lie in order."""
        return self.run(self, x_RD, counts_E)

    def gated(self, x_RD: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """The first half: each row's features, activated, [R, F]."""
        gate_RF, up_RF = self._multiplied(x_RD, self.gate_up_proj, counts_E).chunk(2, dim=-1)
        return self.operations.activate(
            self._adapted("gate_proj", gate_RF, x_RD, counts_E),
            self._adapted("up_proj", up_RF, x_RD, counts_E),
        )

    def down(self, inner_RF: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """The second half: of features, rows of the model's width, [R, D]."""
        y_RD = self._multiplied(inner_RF, self.down_proj, counts_E)
        return self._adapted("down_proj", y_RD, inner_RF, counts_E)

    def _multiplied(
        self, x_RK: torch.Tensor, weight_ENK: torch.Tensor | QuantisedMatrix, counts_E: torch.Tensor
    ) -> torch.Tensor:
        multiply = self.operations.group_gemm
        if isinstance(weight_ENK, QuantisedMatrix):
            return weight_ENK.group_linear(x_RK, counts_E, multiply)
        # Weights kept in fp32 beside autocast's hidden states are cast here: autocast itself does
        # not know grouped products.
        return multiply(x_RK, weight_ENK.to(x_RK.dtype), counts_E)

    def _adapted(
        self, matrix: Matrix, y_RN: torch.Tensor, x_RK: torch.Tensor, counts_E: torch.Tensor
    ) -> torch.Tensor:
        more_RN = None if self.adapter is None else self.adapter(matrix, x_RK, counts_E)
        return y_RN if more_RN is None else y_RN + more_RN.to(y_RN.dtype)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        experts, width, inner = self.down_proj.shape
        return f"{experts} x {width} -> {inner} -> {width}"
