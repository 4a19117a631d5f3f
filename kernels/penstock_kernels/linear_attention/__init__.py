"""Linear attention with decay over packed documents: the gated delta rule (Gated DeltaNet, Kimi
Delta Attention), gated linear attention, and Mamba-2's state-space duality (SSD).
"""

from typing import Any

import torch

from penstock_kernels.linear_attention.chunked import chunked as _chunked
from penstock_kernels.linear_attention.reference import decode_step, shape_mismatch
from penstock_kernels.linear_attention.reference import recurrent as _recurrent
from penstock_kernels.linear_attention.ssd import ssd
from penstock_kernels.op import (
    KernelImpl,
    Op,
    needs_cuda,
    needs_floats,
    tensors_among,
    triton_backend,
)

__all__ = ["decode_step", "linear_attention", "ssd"]

WIDEST = 256
"""Channels of a key: a scan on Triton holds a state of all of them."""


def _unsupported_on_cpu(q_TGK: torch.Tensor, *args: Any, **kwargs: Any) -> str | None:
    if q_TGK.device.type != "cpu":
        return f"its tensors are on {q_TGK.device.type}, and it needs cpu"
    return shape_mismatch(q_TGK, *args, **kwargs)


def _unsupported_on_triton(
    q_TGK: torch.Tensor, k_TGK: torch.Tensor, v_TNV: torch.Tensor, *args: Any, **kwargs: Any
) -> str | None:
    tensors = tensors_among(q_TGK, k_TGK, v_TNV, *args, **kwargs)
    mismatch = shape_mismatch(q_TGK, k_TGK, v_TNV, *args, **kwargs)
    if reason := needs_cuda(*tensors) or mismatch or needs_floats(*tensors):
        return reason
    if not q_TGK.dtype == k_TGK.dtype == v_TNV.dtype:
        return f"q is {q_TGK.dtype}, k is {k_TGK.dtype} and v is {v_TNV.dtype}"
    if k_TGK.shape[2] > WIDEST:
        return f"keys are {k_TGK.shape[2]} wide, and it takes up to {WIDEST}"
    return None


linear_attention = Op(
    "linear_attention",
    _recurrent,
    {
        **triton_backend("linear_attention.triton:linear_attention", _unsupported_on_triton),
        "chunked": KernelImpl(_chunked, _unsupported_on_cpu),
    },
    reference_name="recurrent",
)
