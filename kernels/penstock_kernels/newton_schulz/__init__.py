"""Newton-Schulz iteration of Muon: brings a matrix's singular values near 1."""

import torch

from penstock_kernels.newton_schulz.batched import newton_schulz as _batched
from penstock_kernels.newton_schulz.foreach import each_by_shape
from penstock_kernels.newton_schulz.reference import COEFFICIENTS, EPS, STEPS
from penstock_kernels.newton_schulz.reference import newton_schulz as _reference
from penstock_kernels.op import HAS_TRITON, KernelImpl, Op, needs_cuda

__all__ = ["COEFFICIENTS", "EPS", "STEPS", "each_by_shape", "newton_schulz"]


def _unsupported_none(matrix_NK: torch.Tensor, steps: int = STEPS) -> str | None:
    del matrix_NK, steps


def _unsupported_reason(matrix_NK: torch.Tensor, steps: int = STEPS) -> str | None:
    del steps
    return needs_cuda(matrix_NK)


_FAST: dict[str, KernelImpl[..., torch.Tensor]] = {
    "batched": KernelImpl(_batched, _unsupported_none)
}
if HAS_TRITON:
    from penstock_kernels.newton_schulz.triton import newton_schulz as _triton

    _FAST = {"triton": KernelImpl(_triton, _unsupported_reason, language="triton"), **_FAST}

newton_schulz: Op[..., torch.Tensor] = Op("newton_schulz", _reference, _FAST)
