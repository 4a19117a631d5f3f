"""gpt-oss's experts: biases on both products, a clamped gate, and tensors as its checkpoints have
them, each expert's matrices [inputs, outputs], the features of gate and up by turns.

R rows (a token for each expert it chose), E experts, D model width, F features of an expert.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from penstock.models.decoder_config import ExpertsConfig
from penstock.models.layers.experts import ExpertOperations, Experts, Matrix

ONES = 8
"""Columns of a product that adds biases, of which one is ones and the others are zeros: as few as
every backend of grouped products takes."""


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
        _, inner, width = self.down_proj.shape
        return {"gate_up_proj": (2 * inner, width), "down_proj": (width, inner)}

    def gated(self, x_RD: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """The first half: each row's features, activated, [R, F]."""
        both_R2F = self._product(x_RD, self.gate_up_proj, self.gate_up_proj_bias, counts_E)
        both_R2F = self._adapted("gate_up_proj", both_R2F, x_RD, counts_E)
        return self.operations.clamped_gate(both_R2F, self.alpha, self.limit)

    def down(self, inner_RF: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """The second half: of features, rows of the model's width, [R, D]."""
        y_RD = self._product(inner_RF, self.down_proj, self.down_proj_bias, counts_E)
        return self._adapted("down_proj", y_RD, inner_RF, counts_E)

    def _product(
        self,
        x_RK: torch.Tensor,
        weight_EKN: torch.Tensor,
        bias_EN: torch.Tensor,
        counts_E: torch.Tensor,
    ) -> torch.Tensor:
        """Each row by its expert's matrix, plus its expert's bias, [R, N]."""
        multiply, dtype = self.operations.group_gemm, x_RK.dtype
        y_RN = multiply(x_RK, weight_EKN.to(dtype).mT, counts_E)
        # A product as well: so the bias's gradient is a sum over an expert's rows in fp32, in one
        # order, wherever its rows lie.
        ones_RC = x_RK.new_zeros(x_RK.shape[0], ONES)
        ones_RC[:, 0] = 1
        bias_ENC = F.pad(bias_EN.to(dtype).unsqueeze(-1), (0, ONES - 1))
        return y_RN + multiply(ones_RC, bias_ENC, counts_E)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        experts, inner, width = self.down_proj.shape
        return f"{experts} x {width} -> {inner} -> {width}, alpha={self.alpha}, limit={self.limit}"
