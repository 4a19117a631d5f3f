"""Experts without a gate, as in Nemotron-H.

R rows (one for each token and selected expert), E experts, D width of their inputs and outputs, F
features of an expert.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from penstock.models.decoder_config import ExpertsConfig
from penstock.models.layers.experts import ExpertOperations, Experts, Matrix


class PlainExperts(Experts):
    """`down(activation(up(x)))`; each row uses the matrices of its own expert."""

    stacks = ("up_proj", "down_proj")

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

    def _add_parameters(self, experts: int, inner: int, hidden_size: int) -> None:
        self.up_proj = nn.Parameter(torch.empty(experts, inner, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden_size, inner))

    @property
    def matrices(self) -> Mapping[Matrix, tuple[int, int]]:
        """Output and input features of each of an expert's matrices."""
        return {"up_proj": (self.inner, self.width), "down_proj": (self.width, self.inner)}

    def gate_up(self, x_RD: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """up_proj and the activation, [R, F]."""
        up_RF = self._grouped_linear(x_RD, self.up_proj, counts_E)
        return self.activation(self._add_adapter("up_proj", up_RF, x_RD, counts_E))
