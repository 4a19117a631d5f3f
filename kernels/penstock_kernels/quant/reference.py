"""Definition of quantization and dequantization."""

import torch

from penstock_kernels.quant import block_fp8, fp8, integers, mxfp4, nf4, nvfp4
from penstock_kernels.quant.check import require_finite, require_matrix
from penstock_kernels.quant.formats import Format
from penstock_kernels.quant.packing import split_groups, unpack
from penstock_kernels.quant.quantized_tensor import QuantizedTensor
from penstock_kernels.quant.scales import row_maxima


def quantize(
    weight_NK: torch.Tensor,
    format: Format,
    largest: torch.Tensor | None = None,
) -> QuantizedTensor:
    """Matrices [..., N, K] in a format; largest as scales.largest gives it, of the whole.

    Raises:
        ValueError: it is no matrix of floating point numbers, a number is not finite, or largest
            has another shape.
    """
    require_matrix(weight_NK)
    largest = row_maxima(weight_NK, format, largest)
    global_scales = None
    match format.name:
        case "nf4":
            assert format.group is not None
            codes, scales = nf4.quantize(weight_NK, format.group)
        case "nvfp4":
            assert largest is not None
            codes, scales, global_scales = nvfp4.quantize(weight_NK, largest)
        case "mxfp4":
            codes, scales = mxfp4.quantize(weight_NK)
        case "block_fp8":
            assert largest is not None
            codes, scales = block_fp8.quantize(weight_NK, largest)
        case "fp8":
            assert largest is not None
            codes, scales = fp8.quantize(weight_NK, largest)
        case "int8":
            assert largest is not None
            codes, scales = integers.int8(weight_NK, largest)
        case "int4":
            assert format.group is not None
            codes, scales = integers.int4(weight_NK, format.group)
        case name:
            raise AssertionError(name)
    return require_finite(
        QuantizedTensor(format, weight_NK.shape[-1], codes, scales, global_scales)
    )


def dequantize(quantized: QuantizedTensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The matrices, [..., N, K]: multiplied in float32, rounded once."""
    format, codes = quantized.format, quantized.codes
    match format.codes:
        case "levels":
            values = unpack(codes, format.levels)
        case "int8":
            values = codes.view(torch.int8).float()
        case "e4m3":
            values = codes.view(torch.float8_e4m3fn).float()
    scales = quantized.scales.float()
    if quantized.global_scales is not None:
        scales = scales * quantized.global_scales
    if format.group is None:
        return (values * scales).to(dtype)
    numbers = split_groups(values, format.group) * scales[..., None]
    return numbers.flatten(-2)[..., : quantized.columns].to(dtype)
