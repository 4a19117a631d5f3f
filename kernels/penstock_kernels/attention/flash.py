"""Unsupported inputs of the flash attention kernels behind PyTorch and of the packages, for any
documents.
"""

import torch

from penstock_kernels.attention.segments import VarlenMetadata
from penstock_kernels.attention.sinks import unsupported_sinks

# The kernels read heads in vectors of this many values.
MULTIPLE = 8
WIDEST = 256


def unsupported_tensors(
    q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
) -> str | None:
    """bf16 and fp16 on CUDA only."""
    if torch.version.hip is not None:
        return "this PyTorch is built for ROCm, and it needs CUDA"
    if not all(part.is_cuda for part in (q_TNH, k_TKH, v_TKH)):
        return f"its tensors are on {q_TNH.device.type}, and it needs cuda"
    if q_TNH.dtype not in (torch.bfloat16, torch.float16):
        return f"its tensors are {q_TNH.dtype}, and it takes bfloat16 and float16"
    if q_TNH.shape[-1] % MULTIPLE or q_TNH.shape[-1] > WIDEST:
        return f"heads are {q_TNH.shape[-1]} wide; it takes multiples of {MULTIPLE} up to {WIDEST}"
    return None


def unsupported_inputs(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    segments: VarlenMetadata,
    sinks_N: torch.Tensor | None,
) -> str | None:
    """The same, and inputs that do not fit together."""
    if reason := unsupported_tensors(q_TNH, k_TKH, v_TKH) or unsupported_sinks(q_TNH, sinks_N):
        return reason
    if segments.num_tokens != q_TNH.shape[0]:
        return f"q holds {q_TNH.shape[0]} tokens and the documents {segments.num_tokens}"
    return None


def unsupported_masks(segments: VarlenMetadata) -> str | None:
    """Masks besides causal ones and windows."""
    if segments.start_rows is not None:
        return "start rows hide some of a document's past, and it has causal masks and windows"
    if segments.run_ends is not None:
        return "runs of tokens are bidirectional, and it has causal masks and windows"
    return None
