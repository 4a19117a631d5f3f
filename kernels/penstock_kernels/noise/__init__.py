"""Counter-based noise on dequantized weights: a function of key, row and column.

So it does not depend on sharding, and is recomputed in the backward pass and with activation
checkpointing.
"""

from typing import Any

import torch

from penstock_kernels.noise.reference import add_noise_ as _reference
from penstock_kernels.op import Op, needs_cuda, triton_backend
from penstock_kernels.quant import QuantizedTensor
from penstock_kernels.rng_rows import RowKeys

__all__ = ["RowKeys", "add_noise_"]


def _unsupported_reason(
    weight_NK: torch.Tensor, quantized: QuantizedTensor, *_: Any, **__: Any
) -> str | None:
    if weight_NK.dtype == torch.float64:
        return "the weight is in fp64, and it computes in fp32"
    if weight_NK.stride(-1) != 1:
        return "the weight's rows are not contiguous"
    return needs_cuda(weight_NK, *quantized.tensors.values())


_FAST = triton_backend("noise.triton:add_noise_", _unsupported_reason)
add_noise_: Op[..., torch.Tensor] = Op("add_noise_", _reference, _FAST)
