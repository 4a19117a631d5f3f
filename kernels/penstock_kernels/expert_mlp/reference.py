"""Definition of expert_mlp. The reference of every other implementation."""

from dataclasses import dataclass
from typing import Literal

import torch

from penstock_kernels.clamped_swiglu.reference import clamped_gate
from penstock_kernels.glu.reference import packed_swiglu
from penstock_kernels.group_gemm.reference import group_gemm
from penstock_kernels.permute.reference import Order, permute, unpermute


@dataclass(frozen=True)
class Gate:
    """The activation of gate and up features."""

    name: Literal["silu", "clamped"] = "silu"
    """silu: `glu.packed_swiglu` of two halves; clamped: `clamped_swiglu.clamped_gate`, whose gates
    and ups alternate."""
    alpha: float = 1.0
    limit: float = 0.0
    """Of `clamped` alone."""


def expert_mlp(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor | None,
    order: Order,
    gate_up_E2FD: torch.Tensor,
    down_EDF: torch.Tensor,
    gate: Gate,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, `down(gate(gate_up(x)))`, [T, D].

    T tokens, D model width, K experts per token, E experts of F features. Without weights the
    outputs are summed. Matrices are in any memory layout, as those of `group_gemm`; biases are
    [E, 2 F] and [E, D].
    """
    both_R2F = group_gemm(permute(x_TD, order), gate_up_E2FD, order.counts)
    both_R2F = _add_bias(both_R2F, gate_up_bias, order)
    if gate.name == "silu":
        inner_RF = packed_swiglu(both_R2F)
    else:
        inner_RF = clamped_gate(both_R2F, gate.alpha, gate.limit)
    y_RD = _add_bias(group_gemm(inner_RF, down_EDF, order.counts), down_bias, order)
    return unpermute(y_RD, weights_TK, order)


def _add_bias(y_RN: torch.Tensor, bias_EN: torch.Tensor | None, order: Order) -> torch.Tensor:
    if bias_EN is None:
        return y_RN
    bias_RN = bias_EN.repeat_interleave(order.counts, dim=0)
    past = y_RN.new_zeros(len(y_RN) - len(bias_RN), y_RN.shape[1])
    return y_RN + torch.cat([bias_RN.to(y_RN.dtype), past])
