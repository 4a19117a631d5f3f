"""LoRA on the stacked expert matrices of a transformers model, as PEFT's `target_parameters`.

E experts. A tensor [E, N, K], or [E, K, N] if transposed, has A [E, r, K] and B [E, N, r]; the
model's own code computes with `W + scale * B A`, of every expert.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from penstock.adapters.lora_experts import ExpertLoraParams
from penstock.adapters.names import ADAPTER, Side
from penstock.models.layers.experts import Matrix


class StackedAdapter(ExpertLoraParams):
    """The adapters of a layer's experts. Hooks put the adapted tensors in place of the parameters
    during each call of the experts."""

    def __init__(
        self, experts: nn.Module, matrices: Sequence[Matrix], *, rank: int, scale: float
    ) -> None:
        """Add uninitialized adapters of these parameters to `experts`, in place."""
        self.is_transposed = bool(getattr(experts, "is_transposed", False))
        shapes: dict[tuple[Side, Matrix], tuple[int, ...]] = {}
        for matrix in matrices:
            num_experts, outputs, inputs = experts.get_parameter(matrix).shape
            if self.is_transposed:
                outputs, inputs = inputs, outputs
            shapes["lora_A", matrix] = (num_experts, rank, inputs)
            shapes["lora_B", matrix] = (num_experts, outputs, rank)
        super().__init__(shapes, experts.get_parameter(matrices[0]).device)
        self.scale = scale
        experts.add_module(ADAPTER, self)
        experts.register_forward_pre_hook(self._put_in_place)
        # Also if the call raises, by which checkpointing ends a recomputation early.
        experts.register_forward_hook(self._remove, always_call=True)

    def adapted(self, matrix: str, weight: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor and its delta."""
        left, right = (side[matrix].to(weight.dtype) for side in (self.lora_B, self.lora_A))
        if self.is_transposed:
            left, right = right.mT, left.mT
        return torch.baddbmm(weight, left, right, alpha=self.scale)

    def _put_in_place(self, experts: nn.Module, _: Any) -> None:
        for matrix in self.lora_A:
            # Found before the parameter of that name.
            experts.__dict__[matrix] = self.adapted(matrix, experts.get_parameter(matrix))

    def _remove(self, experts: nn.Module, *_: Any) -> None:
        for matrix in self.lora_A:
            experts.__dict__.pop(matrix, None)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"scale={self.scale}"
