"""Validation of matrices before quantization."""

import torch

from penstock_kernels.quant.quantized_tensor import QuantizedTensor


def require_matrix(weight_NK: torch.Tensor) -> None:
    """Refuse tensors that are no floating-point matrices.

    Raises:
        ValueError: if so.
    """
    if weight_NK.ndim < 2 or not weight_NK.is_floating_point() or not weight_NK.numel():
        raise ValueError(
            "matrices of floating point numbers are quantized, "
            f"and this is {weight_NK.dtype} {tuple(weight_NK.shape)}"
        )


def require_finite(quantized: QuantizedTensor) -> QuantizedTensor:
    """Refuse non-finite values, found by their scales. Synchronizes with the device.

    Raises:
        ValueError: if so.
    """
    scales = quantized.scales if quantized.global_scales is None else quantized.global_scales
    if not bool(scales.float().isfinite().all()):
        raise ValueError(
            f"a matrix of {quantized.shape} has numbers that are not finite: "
            f"it cannot be kept as {quantized.format.name}"
        )
    return quantized
