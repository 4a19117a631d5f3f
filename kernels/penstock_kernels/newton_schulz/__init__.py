"""Newton-Schulz iteration of Muon: brings a matrix's singular values near 1."""

import torch

from penstock_kernels.newton_schulz.reference import (
    COEFFICIENTS,
    EPS,
    STEPS,
    batched,
    each_by_shape,
)
from penstock_kernels.newton_schulz.reference import newton_schulz as _reference
from penstock_kernels.op import KernelImpl, Op, supports_all, tensors_need_cuda, triton_backend

__all__ = ["COEFFICIENTS", "EPS", "STEPS", "each_by_shape", "newton_schulz"]

newton_schulz: Op[..., torch.Tensor] = Op(
    "newton_schulz",
    _reference,
    {
        **triton_backend("newton_schulz.triton:newton_schulz", tensors_need_cuda),
        "batched": KernelImpl(batched, supports_all),
    },
)
