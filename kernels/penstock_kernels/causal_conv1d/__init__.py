"""The short depthwise convolution before linear attention and state-space layers, causal within
each document of a packed micro-batch.

T tokens, C channels, W taps, B documents.
"""

from typing import Any

import torch

from penstock_kernels.attention.segments import VarlenMetadata
from penstock_kernels.causal_conv1d import lean as _lean
from penstock_kernels.causal_conv1d.reference import Activation, decode_step
from penstock_kernels.causal_conv1d.reference import causal_conv1d as _reference
from penstock_kernels.op import (
    KernelImpl,
    Op,
    needs_cuda,
    needs_floats,
    tensors_among,
    triton_backend,
)

__all__ = ["Activation", "causal_conv1d", "decode_step"]

WIDEST = 4
"""Taps that a program on Triton holds."""


def _mismatch(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    segments: VarlenMetadata,
    activation: Activation | None = None,
    initial_state_BWC: torch.Tensor | None = None,
) -> str | None:
    x, weight = tuple(x_TC.shape), tuple(weight_CW.shape)
    if (len(x), len(weight)) != (2, 2) or weight[0] != x[1] or not weight[1]:
        return f"x is {x} and its weight is {weight}"
    if bias_C is not None and tuple(bias_C.shape) != x[1:]:
        return f"x is {x} and its bias is {tuple(bias_C.shape)}"
    if segments.num_tokens != x[0]:
        return f"x holds {x[0]} tokens and the documents {segments.num_tokens}"
    if activation not in (None, "silu"):
        return f"its activation is {activation}, and it has silu"
    states = len(segments.lengths), weight[1] - 1, x[1]
    if initial_state_BWC is not None and tuple(initial_state_BWC.shape) != states:
        return f"initial_state is {tuple(initial_state_BWC.shape)}, and the states are {states}"
    return None


def _unsupported_on_cpu(x_TC: torch.Tensor, *args: Any, **kwargs: Any) -> str | None:
    if x_TC.device.type != "cpu":
        return f"its tensors are on {x_TC.device.type}, and it needs cpu"
    return _mismatch(x_TC, *args, **kwargs)


def _unsupported_on_triton(
    x_TC: torch.Tensor, weight_CW: torch.Tensor, *args: Any, **kwargs: Any
) -> str | None:
    tensors = tensors_among(x_TC, weight_CW, *args, **kwargs)
    mismatch = _mismatch(x_TC, weight_CW, *args, **kwargs)
    if reason := needs_cuda(*tensors) or mismatch or needs_floats(*tensors):
        return reason
    if weight_CW.shape[1] > WIDEST:
        return f"its kernel has {weight_CW.shape[1]} taps, and it takes up to {WIDEST}"
    return None


causal_conv1d = Op(
    "causal_conv1d",
    _reference,
    {
        **triton_backend("causal_conv1d.triton:causal_conv1d", _unsupported_on_triton),
        "lean": KernelImpl(_lean.causal_conv1d, _unsupported_on_cpu),
    },
)
