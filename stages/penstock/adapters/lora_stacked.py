"""LoRA on the stacked expert matrices of a transformers model, as PEFT's `target_parameters`.

R rows, E experts. A tensor [E, N, K], or [E, K, N] if transposed, has A [E, r, K] and B [E, N, r];
the model's own code computes with `W + scale * B A`, of every expert. Where inputs of adapters have
dropout, their products are added to those of W instead, by code in place of the model's.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.adapters.lora_experts import ExpertAdapter, ExpertLoraParams
from penstock.adapters.names import ADAPTER, Side
from penstock.models.layers.dropout import RowDropout, rows_rng
from penstock.models.layers.experts import Matrix
from penstock_kernels.group_gemm import group_gemm
from penstock_kernels.permute import Order, permute, sort_by_expert, unpermute


class StackedAdapter(ExpertAdapter):
    """The adapters of a layer's experts. Without dropout, hooks put the adapted tensors in place of
    the parameters during each call of the experts."""

    def __init__(
        self,
        experts: nn.Module,
        matrices: Sequence[Matrix],
        *,
        rank: int,
        scale: float,
        dropout: RowDropout | None = None,
    ) -> None:
        """Add uninitialized adapters of these parameters to `experts`, in place. With `dropout`,
        the experts must be called as transformers' `ALL_EXPERTS_FUNCTIONS` are."""
        self.is_transposed = bool(getattr(experts, "is_transposed", False))
        shapes: dict[tuple[Side, Matrix], tuple[int, ...]] = {}
        for matrix in matrices:
            num_experts, outputs, inputs = experts.get_parameter(matrix).shape
            if self.is_transposed:
                outputs, inputs = inputs, outputs
            shapes["lora_A", matrix] = (num_experts, rank, inputs)
            shapes["lora_B", matrix] = (num_experts, outputs, rank)
        device = experts.get_parameter(matrices[0]).device
        super().__init__(
            shapes,
            device,
            shared=ExpertLoraParams({}, device),
            scale=scale,
            multiply=group_gemm,
            dropout=dropout,
        )
        experts.add_module(ADAPTER, self)
        if dropout is None:
            # Methods, of which a copy of the model has its own.
            experts.register_forward_pre_hook(self._put_in_place)
            # Also if the call raises, by which checkpointing ends a recomputation early.
            experts.register_forward_hook(self._remove, always_call=True)
        else:
            experts.add_module("row_dropout", dropout)
            experts.forward = partial(self._call, experts, dropout)

    def adapted(self, matrix: str, weight: torch.Tensor) -> torch.Tensor:
        left, right = (factors[matrix].to(weight.dtype) for factors in (self.lora_B, self.lora_A))
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

    def _call(
        self,
        experts: Any,
        dropout: RowDropout,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """The experts' outputs of tokens [T, D] and their choices [T, K]."""
        order = sort_by_expert(top_k_index, experts.num_experts)
        expert_R = top_k_index.flatten()[order.copy_of_row]
        linear = partial(self._linear, experts, order, expert_R)
        with rows_rng(dropout.indices(order)):
            up = linear(
                "gate_up_proj" if experts.has_gate else "up_proj", permute(hidden_states, order)
            )
            inner_RF = experts._apply_gate(up) if experts.has_gate else experts.act_fn(up)
            y_RD = linear("down_proj", inner_RF)
        if experts.has_post_expert_norm:
            y_RD = experts.post_expert_norm(y_RD)
        return unpermute(y_RD, top_k_weights, order).to(hidden_states.dtype)

    def _linear(
        self, experts: Any, order: Order, expert_R: torch.Tensor, matrix: Matrix, x_RK: torch.Tensor
    ) -> torch.Tensor:
        weight = experts.get_parameter(matrix)
        y_RN = group_gemm(
            x_RK.to(weight.dtype), weight.mT if self.is_transposed else weight, order.counts
        )
        if experts.has_bias:
            y_RN = y_RN + experts.get_parameter(f"{matrix}_bias")[expert_R]
        delta_RN = self(matrix, x_RK, order.counts)
        return y_RN if delta_RN is None else y_RN + delta_RN.to(y_RN.dtype)
