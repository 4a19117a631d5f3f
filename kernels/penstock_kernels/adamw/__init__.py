"""Fused AdamW step, for weights and states in float32 or bfloat16.

bfloat16 results are rounded stochastically with counter-based random numbers, so that small updates
are kept and results do not depend on sharding; or with Kahan summation.
"""

from collections.abc import Mapping, Sequence

import torch

from penstock_kernels.adamw.foreach import StepTensors, adamw_foreach_
from penstock_kernels.adamw.reference import adamw_ as _reference
from penstock_kernels.adamw.settings import Settings
from penstock_kernels.op import HAS_TRITON, KernelImpl, Op, needs_cuda
from penstock_kernels.rng_rows import RowKeys, copy_tables

__all__ = ["RowKeys", "Settings", "StepTensors", "adamw_", "adamw_foreach_", "copy_tables"]


def _unsupported_reason(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    settings: Settings,
    runs: Sequence[RowKeys] | None = None,
    first_column: int = 0,
    lost: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> str | None:
    del settings, runs, first_column, table
    return needs_cuda(weight, gradient, first, second, *([] if lost is None else [lost]))


_FAST: Mapping[str, KernelImpl[..., None]] = {}
if HAS_TRITON:
    from penstock_kernels.adamw.triton import adamw_ as _triton

    _FAST = {"triton": KernelImpl(_triton, _unsupported_reason, language="triton")}

adamw_: Op[..., None] = Op("adamw_", _reference, _FAST)
