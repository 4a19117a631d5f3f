"""Stochastic rounding of float32 to bfloat16: up or down with the correct mean.

Counter-based: a function of key, row and column, so it does not depend on sharding.
"""

import torch

from penstock_kernels.op import Op, tensors_need_cuda, triton_backend
from penstock_kernels.rng_rows import RowKeys
from penstock_kernels.stochastic_rounding.reference import stochastic_round as _reference

__all__ = ["RowKeys", "stochastic_round"]

_FAST = triton_backend("stochastic_rounding.triton:stochastic_round", tensors_need_cuda)
stochastic_round: Op[..., torch.Tensor] = Op("stochastic_round", _reference, _FAST)
