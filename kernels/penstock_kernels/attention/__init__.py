"""Varlen attention: causal within each document of a packed micro-batch; grouped-query attention,
sliding windows, sinks, soft caps, start rows that mask a document further, and bidirectional runs.
"""

from collections.abc import Callable
from functools import partial

import torch

from penstock_kernels.attention import native as _native
from penstock_kernels.attention import packages as _packages
from penstock_kernels.attention import sdpa as _sdpa
from penstock_kernels.attention.reference import eager as _eager
from penstock_kernels.attention.segments import VarlenMetadata
from penstock_kernels.flash_packages import PACKAGES
from penstock_kernels.op import KernelImpl, Op

__all__ = ["VarlenMetadata", "attention"]


def _packaged(name: str, run: Callable[..., torch.Tensor]) -> KernelImpl[..., torch.Tensor]:
    unsupported_reason = partial(_packages.unsupported_reason, name)
    return KernelImpl(run, unsupported_reason, missing_reason=PACKAGES[name].missing_reason())


attention = Op(
    "attention",
    _eager,
    {
        "flash_attention_3": _packaged("flash_attention_3", _packages.flash_attention_3),
        "native": KernelImpl(_native.native, _native.unsupported_reason),
        "sdpa": KernelImpl(_sdpa.sdpa, _sdpa.unsupported_reason),
        # By name only: version 4 is new, and PyTorch includes version 2's kernels.
        "flash_attention_4": _packaged("flash_attention_4", _packages.flash_attention_4),
        "flash_attention_2": _packaged("flash_attention_2", _packages.flash_attention_2),
    },
    reference_name="eager",
)
