"""Linear attention with decay over packed documents: the gated delta rule (Gated DeltaNet, Kimi
Delta Attention), gated linear attention, and Mamba-2's state-space duality (SSD).
"""

from collections.abc import Mapping

import torch

from penstock_kernels.attention.segments import VarlenMetadata
from penstock_kernels.linear_attention.chunked import chunked as _chunked
from penstock_kernels.linear_attention.reference import decode_step
from penstock_kernels.linear_attention.reference import recurrent as _recurrent
from penstock_kernels.linear_attention.ssd import ssd
from penstock_kernels.op import HAS_TRITON, KernelImpl, Op, needs_cuda, needs_floats

__all__ = ["decode_step", "linear_attention", "ssd"]


def _misfit(
    q_TGK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_TNV: torch.Tensor,
    log_decay_TN: torch.Tensor,
    beta_TN: torch.Tensor | None,
    segments: VarlenMetadata,
    scale: float,
    initial_state_BNKV: torch.Tensor | None = None,
) -> str | None:
    del scale
    q, k, v = (tuple(x.shape) for x in (q_TGK, k_TGK, v_TNV))
    if (len(q), len(v)) != (3, 3) or q != k or q[0] != v[0] or not q[1] or v[1] % q[1]:
        return f"q is {q}, k is {k} and v is {v}"
    decay = tuple(log_decay_TN.shape)
    # Sizes may be symbolic, and are not found in a tuple of tuples.
    if decay != v[:2] and decay != (*v[:2], k[2]):
        return f"log_decay is {decay}, and v is {v}"
    if beta_TN is not None and tuple(beta_TN.shape) != v[:2]:
        return f"beta is {tuple(beta_TN.shape)}, and v is {v}"
    if segments.num_tokens != q[0]:
        return f"q holds {q[0]} tokens and the documents {segments.num_tokens}"
    if segments.start_rows is not None:
        return "start rows hide some of a document's past, and its state has all of it"
    states = len(segments.lengths), v[1], k[2], v[2]
    if initial_state_BNKV is not None and tuple(initial_state_BNKV.shape) != states:
        return f"initial_state is {tuple(initial_state_BNKV.shape)}, and the states are {states}"
    return None


def _unsupported_on_cpu(
    q_TGK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_TNV: torch.Tensor,
    log_decay_TN: torch.Tensor,
    beta_TN: torch.Tensor | None,
    segments: VarlenMetadata,
    scale: float,
    initial_state_BNKV: torch.Tensor | None = None,
) -> str | None:
    if q_TGK.device.type != "cpu":
        return f"its tensors are on {q_TGK.device.type}, and it needs cpu"
    args = q_TGK, k_TGK, v_TNV, log_decay_TN, beta_TN, segments, scale, initial_state_BNKV
    return _misfit(*args)


def _unsupported_on_triton(
    q_TGK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_TNV: torch.Tensor,
    log_decay_TN: torch.Tensor,
    beta_TN: torch.Tensor | None,
    segments: VarlenMetadata,
    scale: float,
    initial_state_BNKV: torch.Tensor | None = None,
) -> str | None:
    args = q_TGK, k_TGK, v_TNV, log_decay_TN, beta_TN, segments, scale, initial_state_BNKV
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if reason := needs_cuda(*tensors) or _misfit(*args) or needs_floats(*tensors):
        return reason
    if not q_TGK.dtype == k_TGK.dtype == v_TNV.dtype:
        return f"q is {q_TGK.dtype}, k is {k_TGK.dtype} and v is {v_TNV.dtype}"
    if k_TGK.shape[2] > WIDEST:
        return f"keys are {k_TGK.shape[2]} wide, and it takes up to {WIDEST}"
    return None


_FAST: Mapping[str, KernelImpl[..., tuple[torch.Tensor, torch.Tensor]]] = {}
if HAS_TRITON:
    from penstock_kernels.linear_attention.triton import WIDEST
    from penstock_kernels.linear_attention.triton import linear_attention as _triton

    _FAST = {"triton": KernelImpl(_triton, _unsupported_on_triton, language="triton")}

linear_attention = Op(
    "linear_attention",
    _recurrent,
    {
        **_FAST,
        "chunked": KernelImpl(_chunked, _unsupported_on_cpu),
    },
    reference_name="recurrent",
)
