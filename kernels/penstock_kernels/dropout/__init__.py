"""Counter-based dropout: the mask is a function of token, feature and key, without generator state.

So it does not depend on sharding or on the order of computation, and is recomputed in the backward
pass.
"""

from typing import Any

import torch

from penstock_kernels.dropout.reference import drop as _reference
from penstock_kernels.dropout.reference import dropping, on_host
from penstock_kernels.op import Op, needs_cuda, triton_backend

__all__ = ["dropout", "on_host"]


def _unsupported_reason(
    x_TF: torch.Tensor, places_T: torch.Tensor, *_: Any, **__: Any
) -> str | None:
    if x_TF.ndim != 2 or x_TF.shape[:1] != places_T.shape:
        return f"x is {tuple(x_TF.shape)} and its places are {tuple(places_T.shape)}"
    if x_TF.dtype == torch.float64:
        return "x is in fp64, and it computes in fp32"
    return needs_cuda(x_TF, places_T)


_FAST = triton_backend("dropout.triton:dropout", _unsupported_reason)
dropout = Op("dropout", dropping("reference", _reference), _FAST)
