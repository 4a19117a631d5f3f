"""Fused AdamW step, for weights and states in float32 or bfloat16.

bfloat16 results are rounded stochastically with counter-based random numbers, so that small updates
are kept and results do not depend on sharding; or with Kahan summation.
"""

from penstock_kernels.adamw.foreach import StepTensors, adamw_foreach_
from penstock_kernels.adamw.reference import Settings
from penstock_kernels.adamw.reference import adamw_ as _reference
from penstock_kernels.op import Op, tensors_need_cuda, triton_backend
from penstock_kernels.rng_rows import RowKeys, copy_tables

__all__ = ["RowKeys", "Settings", "StepTensors", "adamw_", "adamw_foreach_", "copy_tables"]

_FAST = triton_backend("adamw.triton:adamw_", tensors_need_cuda)
adamw_: Op[..., None] = Op("adamw_", _reference, _FAST)
