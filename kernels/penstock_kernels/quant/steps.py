"""Quantization step sizes, which scale the noise of adaptive quantization noise (AQN)."""

import torch

from penstock_kernels.quant.levels import NF4
from penstock_kernels.quant.quantized_tensor import QuantizedTensor

STEPS = {
    # From 0 to the smallest value.
    "nvfp4": 0.5,
    "mxfp4": 0.5,
    # Between values from 1 to 2.
    "fp8": 0.125,
    "block_fp8": 0.125,
    # Half of the narrowest gap above 0: the maximum error there.
    "nf4": 0.5 * NF4[8],
    "int8": 0.5,
    "int4": 0.5,
}
"""In units of the scale, by format."""


def step_size(quantized: QuantizedTensor) -> torch.Tensor:
    """The step of each group, float32 [..., N, G]; G is 1 where rows have one scale."""
    scales = quantized.scales.float()
    if quantized.global_scales is not None:
        scales = scales * quantized.global_scales
    return scales * STEPS[quantized.format.name]
