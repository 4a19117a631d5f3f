"""Unsupported inputs of the flash attention kernels behind PyTorch, for any documents."""

import torch

MULTIPLE = 8
"""The kernels read heads in vectors of this many values."""
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
