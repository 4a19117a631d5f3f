"""The experts of a MoE layer, in two stacked tensors.

T tokens, K experts per token, R rows (one for each token and selected expert), E experts, D model
width, F features of an expert.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal, ParamSpec, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from penstock.models.decoder_config import DecoderConfig, ExpertsConfig
from penstock.models.layers.dropout import RowDropout, rows_rng
from penstock.models.layers.layer_ops import ACTIVATIONS
from penstock.models.layers.quantized_linear import QuantizedMatrix
from penstock_kernels.clamped_swiglu import clamped_gate
from penstock_kernels.expert_mlp import Gate, expert_mlp
from penstock_kernels.glu import packed_swiglu, swiglu
from penstock_kernels.group_gemm import group_gemm
from penstock_kernels.op import Op
from penstock_kernels.permute import Order, permute, unpermute

P = ParamSpec("P")
R = TypeVar("R")

Implementation = Literal["auto", "eager", "native", "triton", "quack"]

Matrix = Literal["gate_proj", "up_proj", "gate_up_proj", "down_proj"]
"""Native names of an expert's matrices."""
Stack = Literal["gate_up_proj", "up_proj", "down_proj"]
"""Names of the parameters that stack them."""


# Width of the matmul that adds biases. One column is ones, the others are zeros; 8 is the least
# that every grouped GEMM backend supports.
BIAS_GEMM_WIDTH = 8


@dataclass(frozen=True)
class ExpertOperations:
    """The kernels of a layer's experts, selected once when the model is built."""

    group_gemm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    permute: Callable[[torch.Tensor, Order], torch.Tensor]
    unpermute: Callable[[torch.Tensor, torch.Tensor | None, Order], torch.Tensor]
    activate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    packed_activate: Callable[[torch.Tensor], torch.Tensor]
    """`activate` of the two halves of each row."""
    clamped_gate: Callable[[torch.Tensor, float, float], torch.Tensor]
    fused: Callable[..., torch.Tensor] | None = None
    """`expert_mlp`, where the implementation has one: all of these at once."""


def select_expert_ops(implementation: Implementation) -> ExpertOperations:
    """The kernels of one implementation; `auto` selects the best that supports the inputs.

    The name selects the grouped GEMM. Permutation and activation use the same backend if they have
    it, otherwise their best one; `eager` uses eager PyTorch for all. `triton` also fuses all of it.

    Raises UnsupportedError if this machine's packages lack the implementation.
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
        packed_activate=chosen(packed_swiglu),
        clamped_gate=chosen(clamped_gate),
        fused=expert_mlp.backend(implementation) if implementation == "triton" else None,
    )


@dataclass(frozen=True, eq=False)
class Routing:
    """The rows of tokens for their experts, and what the experts' outputs are multiplied by.

    Not among the tensors of a call, of which FSDP would cast the weights.
    """

    order: Order
    weights_TK: torch.Tensor | None = None  # noqa: N815 - T and K name the dimensions
    """None: the outputs are summed."""
    indices_R: torch.Tensor | None = None  # noqa: N815 - R names the dimension
    """The rows' `Experts.row_indices`."""


class RunExperts(Protocol):
    """Calls `gate_up` and `down` of experts in this order."""

    def __call__(
        self, experts: "Experts", x_RD: torch.Tensor, counts_E: torch.Tensor, /
    ) -> torch.Tensor: ...


def call_experts(experts: "Experts", x_RD: torch.Tensor, counts_E: torch.Tensor, /) -> torch.Tensor:
    """Call `gate_up` and `down` directly."""
    return experts.down(experts.gate_up(x_RD, counts_E), counts_E)


class Experts(nn.Module):
    """`down(silu(gate(x)) * up(x))`; each row uses the matrices of its own expert.

    Parameters are [E, outputs, inputs], or [E, inputs, outputs] if `is_transposed`; quantized
    matrices are always [E, outputs, inputs].

    Dimension 0 of both parameters is the expert, so expert parallelism shards it. The caller that
    builds the model may replace two hooks. `run` calls the two halves, e.g. with recomputation in
    the backward pass. `adapter` is called with a matrix's name, its input and the counts, and
    returns what is added to the matmul's output, or None; `row_dropout` is the dropout of its
    inputs.
    """

    stacks: ClassVar[tuple[Stack, Stack]] = ("gate_up_proj", "down_proj")
    """The two parameters."""
    gate: Gate | None = Gate()
    """The activation, if `expert_mlp` has it."""
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(
        self, config: ExpertsConfig, hidden_size: int, *, operations: ExpertOperations
    ) -> None:
        super().__init__()
        self.inner, self.width = config.intermediate_size, hidden_size
        self.num_experts, self.is_stacked = config.num_experts, config.is_stacked
        self.is_transposed = config.is_transposed
        features = {
            "gate_up_proj": (2 * self.inner, self.width),
            "up_proj": (self.inner, self.width),
        }
        features["down_proj"] = (self.width, self.inner)
        for stack in self.stacks:
            outputs, inputs = features[stack]
            shape = (inputs, outputs) if self.is_transposed else (outputs, inputs)
            self.register_parameter(stack, nn.Parameter(torch.empty(self.num_experts, *shape)))
            if config.clamped:
                bias = torch.empty(self.num_experts, outputs)
                self.register_parameter(f"{stack}_bias", nn.Parameter(bias))
        self.operations = operations
        self.run: RunExperts = call_experts
        self.adapter: nn.Module | None = None
        self.row_dropout: RowDropout | None = None

    @property
    def matrices(self) -> Mapping[Matrix, tuple[int, int]]:
        """Output and input features of each of an expert's matrices."""
        inner, width = self.inner, self.width
        down: dict[Matrix, tuple[int, int]] = {"down_proj": (width, inner)}
        if self.is_stacked:
            return {"gate_up_proj": (2 * inner, width), **down}
        return {"gate_proj": (inner, width), "up_proj": (inner, width), **down}

    def row_indices(self, order: Order) -> torch.Tensor | None:
        """The indices of rows for dropout masks; None without dropout."""
        return None if self.row_dropout is None else self.row_dropout.indices(order)

    def forward(self, x_TD: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The weighted sum of each token's experts, [T, D]."""
        order, operations = routing.order, self.operations
        if operations.fused is not None and self.gate is not None and self.is_plain:
            # Explicit casts, as in `_grouped_linear`.
            matrices = [
                self._outputs_first(self.get_parameter(stack).to(x_TD.dtype))
                for stack in self.stacks
            ]
            biases = [bias.to(x_TD.dtype) for bias in self.biases]
            return operations.fused(x_TD, routing.weights_TK, order, *matrices, self.gate, *biases)
        rows_RD = operations.permute(x_TD, order)
        with nullcontext() if routing.indices_R is None else rows_rng(routing.indices_R):
            y_RD = self.run(self, rows_RD, order.counts)
        # The rows end here if no backward pass reads them, before their sums are made.
        del rows_RD
        return operations.unpermute(y_RD, routing.weights_TK, order)

    @property
    def is_plain(self) -> bool:
        # Whether nothing is computed between or beside the two matrices but the activation.
        matrices = (getattr(self, stack) for stack in self.stacks)
        is_quantized = any(isinstance(matrix, QuantizedMatrix) for matrix in matrices)
        return self.adapter is None and self.run is call_experts and not is_quantized

    @property
    def biases(self) -> Sequence[nn.Parameter]:
        """Those of the two matrices, or none."""
        return ()

    def gate_up(self, x_RD: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """gate_up_proj and the activation, [R, F]."""
        both_RF = self._grouped_linear(x_RD, self.gate_up_proj, counts_E)
        if self.is_stacked:
            both_RF = self._add_adapter("gate_up_proj", both_RF, x_RD, counts_E)
        # Gate and up are one matmul, whose outputs are split where each has an adapter of its own.
        if self.adapter is None or self.is_stacked:
            return self.operations.packed_activate(both_RF)
        gate_RF, up_RF = both_RF.chunk(2, dim=-1)
        return self.operations.activate(
            self._add_adapter("gate_proj", gate_RF, x_RD, counts_E),
            self._add_adapter("up_proj", up_RF, x_RD, counts_E),
        )

    def down(self, inner_RF: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """down_proj, [R, D]."""
        y_RD = self._grouped_linear(inner_RF, self.down_proj, counts_E)
        return self._add_adapter("down_proj", y_RD, inner_RF, counts_E)

    def _grouped_linear(
        self, x_RK: torch.Tensor, weight_ENK: torch.Tensor | QuantizedMatrix, counts_E: torch.Tensor
    ) -> torch.Tensor:
        multiply = self.operations.group_gemm
        if isinstance(weight_ENK, QuantizedMatrix):
            return weight_ENK.group_linear(x_RK, counts_E, multiply)
        # Explicit cast of fp32 weights beside autocast's hidden states: torch.autocast does not
        # cover grouped GEMMs.
        return multiply(x_RK, self._outputs_first(weight_ENK.to(x_RK.dtype)), counts_E)

    def _outputs_first(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.mT if self.is_transposed else weight

    def _add_adapter(
        self, matrix: Matrix, y_RN: torch.Tensor, x_RK: torch.Tensor, counts_E: torch.Tensor
    ) -> torch.Tensor:
        more_RN = None if self.adapter is None else self.adapter(matrix, x_RK, counts_E)
        return y_RN if more_RN is None else y_RN + more_RN.to(y_RN.dtype)

    def extra_repr(self) -> str:
        experts, width = self.down_proj.shape[0], self.width
        return f"{experts} x {width} -> {self.inner} -> {width}"


class PlainExperts(Experts):
    """Experts without a gate, as in Nemotron-H: `down(activation(up(x)))`."""

    stacks = ("up_proj", "down_proj")
    gate = None
    up_proj: nn.Parameter

    def __init__(
        self,
        config: ExpertsConfig,
        width: int,
        *,
        operations: ExpertOperations,
        activation: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__(config, width, operations=operations)
        self.activation = activation

    @property
    def matrices(self) -> Mapping[Matrix, tuple[int, int]]:
        return {"up_proj": (self.inner, self.width), "down_proj": (self.width, self.inner)}

    def gate_up(self, x_RD: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        up_RF = self._grouped_linear(x_RD, self.up_proj, counts_E)
        return self.activation(self._add_adapter("up_proj", up_RF, x_RD, counts_E))


class ClampedExperts(Experts):
    """Experts of gpt-oss: `down(clamp(gate(x)) * sigmoid(alpha * clamp(gate(x))) * (clamp(up(x)) +
    1))`, with biases on both matrices. Gate and up features are interleaved."""

    gate_up_proj_bias: nn.Parameter
    down_proj_bias: nn.Parameter

    def __init__(
        self, config: ExpertsConfig, hidden_size: int, *, operations: ExpertOperations
    ) -> None:
        super().__init__(config, hidden_size, operations=operations)
        assert config.clamped is not None
        self.alpha, self.limit = config.clamped.alpha, config.clamped.limit
        self.gate = Gate("clamped", self.alpha, self.limit)

    @property
    def biases(self) -> Sequence[nn.Parameter]:
        return self.gate_up_proj_bias, self.down_proj_bias

    def gate_up(self, x_RD: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        both_R2F = self._biased_group_linear(
            x_RD, self.gate_up_proj, self.gate_up_proj_bias, counts_E
        )
        both_R2F = self._add_adapter("gate_up_proj", both_R2F, x_RD, counts_E)
        return self.operations.clamped_gate(both_R2F, self.alpha, self.limit)

    def down(self, inner_RF: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        y_RD = self._biased_group_linear(inner_RF, self.down_proj, self.down_proj_bias, counts_E)
        return self._add_adapter("down_proj", y_RD, inner_RF, counts_E)

    def _biased_group_linear(
        self,
        x_RK: torch.Tensor,
        weight_EKN: torch.Tensor | QuantizedMatrix,
        bias_EN: torch.Tensor,
        counts_E: torch.Tensor,
    ) -> torch.Tensor:
        y_RN = self._grouped_linear(x_RK, weight_EKN, counts_E)
        # The bias is added by a grouped GEMM too, so that its gradient is a sum over the expert's
        # rows in fp32 and in a fixed order, wherever the rows are.
        ones_RC = x_RK.new_zeros(x_RK.shape[0], BIAS_GEMM_WIDTH)
        ones_RC[:, 0] = 1
        bias_ENC = F.pad(bias_EN.to(x_RK.dtype).unsqueeze(-1), (0, BIAS_GEMM_WIDTH - 1))
        return y_RN + self.operations.group_gemm(ones_RC, bias_ENC, counts_E)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, alpha={self.alpha}, limit={self.limit}"


def build_experts(
    config: DecoderConfig, experts: ExpertsConfig, operations: ExpertOperations
) -> Experts:
    """The experts of a layer, as the config defines them."""
    width = experts.latent_size or config.hidden_size
    if experts.clamped:
        return ClampedExperts(experts, width, operations=operations)
    if not config.gated:
        activation = ACTIVATIONS[config.activation]
        return PlainExperts(experts, width, operations=operations, activation=activation)
    return Experts(experts, width, operations=operations)
