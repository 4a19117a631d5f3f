"""Experts of gpt-oss: biases on both matrices, a clamped gated activation, and the layout of its
checkpoints: matrices are [inputs, outputs], and gate and up features are interleaved.

R rows (one for each token and selected expert), E experts, D model width, F features of an expert.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from penstock.models.decoder_config import ExpertsConfig
from penstock.models.layers.experts import ExpertOperations, Experts, Matrix
from penstock.models.layers.quantized_linear import QuantizedMatrix

BIAS_GEMM_WIDTH = 8
"""Width of the matmul that adds biases. One column is ones, the others are zeros; 8 is the least
that every grouped GEMM backend supports."""


class ClampedExperts(Experts):
    """`down(clamp(gate(x)) * sigmoid(alpha * clamp(gate(x))) * (clamp(up(x)) + 1))`."""

    def __init__(
        self, config: ExpertsConfig, hidden_size: int, *, operations: ExpertOperations
    ) -> None:
        super().__init__(config, hidden_size, operations=operations)
        assert config.clamped is not None
        self.alpha, self.limit = config.clamped.alpha, config.clamped.limit

    def _add_parameters(self, experts: int, inner: int, hidden_size: int) -> None:
        self.gate_up_proj = nn.Parameter(torch.empty(experts, hidden_size, 2 * inner))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * inner))
        self.down_proj = nn.Parameter(torch.empty(experts, inner, hidden_size))
        self.down_proj_bias = nn.Parameter(torch.empty(experts, hidden_size))

    @property
    def matrices(self) -> Mapping[Matrix, tuple[int, int]]:
        """Output and input features of each of an expert's matrices."""
        return {"gate_up_proj": (2 * self.inner, self.width), "down_proj": (self.width, self.inner)}

    def gate_up(self, x_RD: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """gate_up_proj and the activation, [R, F]."""
        both_R2F = self._biased_group_linear(
            x_RD, self.gate_up_proj, self.gate_up_proj_bias, counts_E
        )
        both_R2F = self._add_adapter("gate_up_proj", both_R2F, x_RD, counts_E)
        return self.operations.clamped_gate(both_R2F, self.alpha, self.limit)

    def down(self, inner_RF: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """down_proj, [R, D]."""
        y_RD = self._biased_group_linear(inner_RF, self.down_proj, self.down_proj_bias, counts_E)
        return self._add_adapter("down_proj", y_RD, inner_RF, counts_E)

    def _biased_group_linear(
        self,
        x_RK: torch.Tensor,
        weight_EKN: torch.Tensor | QuantizedMatrix,
        bias_EN: torch.Tensor,
        counts_E: torch.Tensor,
    ) -> torch.Tensor:
        """Each row times its expert's matrix plus its expert's bias, [R, N]."""
        multiply, dtype = self.operations.group_gemm, x_RK.dtype
        if isinstance(weight_EKN, QuantizedMatrix):
            y_RN = weight_EKN.group_linear(x_RK, counts_E, multiply)
        else:
            y_RN = multiply(x_RK, weight_EKN.to(dtype).mT, counts_E)
        # The bias is added by a grouped GEMM too, so that its gradient is a sum over the expert's
        # rows in fp32 and in a fixed order, wherever the rows are.
        ones_RC = x_RK.new_zeros(x_RK.shape[0], BIAS_GEMM_WIDTH)
        ones_RC[:, 0] = 1
        bias_ENC = F.pad(bias_EN.to(dtype).unsqueeze(-1), (0, BIAS_GEMM_WIDTH - 1))
        return y_RN + multiply(ones_RC, bias_ENC, counts_E)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{super().extra_repr()}, alpha={self.alpha}, limit={self.limit}"
