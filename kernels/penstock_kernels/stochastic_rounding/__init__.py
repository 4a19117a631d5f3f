"""Stochastic rounding of float32 to bfloat16: up or down with the correct mean.

Counter-based: a function of key, row and column, so it does not depend on sharding.
"""

from collections.abc import Mapping, Sequence

import torch

from penstock_kernels.op import HAS_TRITON, KernelImpl, Op, needs_cuda
from penstock_kernels.rng_rows import RowKeys
from penstock_kernels.stochastic_rounding.reference import stochastic_round as _reference

__all__ = ["RowKeys", "stochastic_round"]


def _unsupported_reason(
    x_NK: torch.Tensor, runs: Sequence[RowKeys], first_column: int = 0
) -> str | None:
    del runs, first_column
    return needs_cuda(x_NK)


_FAST: Mapping[str, KernelImpl[..., torch.Tensor]] = {}
if HAS_TRITON:
    from penstock_kernels.stochastic_rounding.triton import stochastic_round as _triton

    _FAST = {"triton": KernelImpl(_triton, _unsupported_reason, language="triton")}

stochastic_round: Op[..., torch.Tensor] = Op("stochastic_round", _reference, _FAST)
