"""Definition of quantization and dequantization.

N rows and K columns of a matrix, G groups of a row. Functions of one format return its codes and
its scales.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from penstock_kernels.quant.formats import NF4_MIDPOINTS, Format
from penstock_kernels.quant.quantized_tensor import QuantizedTensor
from penstock_kernels.quant.scales import (
    E2M1_MOST,
    E4M3_MOST,
    INT4_MOST,
    INT8_MOST,
    SMALLEST,
    divide_float32,
    row_maxima,
)


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
    tensors = _QUANTIZE[format.name](weight_NK, format.group, largest)
    return require_finite(QuantizedTensor(format, weight_NK.shape[-1], *tensors))


def dequantize(quantized: QuantizedTensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The matrices, [..., N, K]: multiplied in float32, rounded once."""
    format, codes = quantized.format, quantized.codes
    match format.codes:
        case "levels":
            values = _unpack(codes, format.levels)
        case "int8":
            values = codes.view(torch.int8).float()
        case "e4m3":
            values = codes.view(torch.float8_e4m3fn).float()
    scales = quantized.float_scales()
    if format.group is None:
        return (values * scales).to(dtype)
    numbers = _split_groups(values, format.group) * scales[..., None]
    return numbers.flatten(-2)[..., : quantized.columns].to(dtype)


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


def _nf4(weight_NK: torch.Tensor, group: int, _: Any) -> tuple[torch.Tensor, ...]:
    """Each group is divided by its absolute maximum, and each value rounded to a level."""
    x = _split_groups(weight_NK, group)
    scales = x.abs().amax(-1).clamp(min=SMALLEST)
    midpoints = torch.tensor(NF4_MIDPOINTS, device=x.device)
    # Ties go to the lower level, as in bitsandbytes; scales stay float32.
    # The number of midpoints strictly below.
    return _pack(torch.bucketize(x / scales[..., None], midpoints, out_int32=True)), scales


def _int4(weight_NK: torch.Tensor, group: int, _: Any) -> tuple[torch.Tensor, ...]:
    """Codes are integers plus 8. Halves are rounded to even."""
    x = _split_groups(weight_NK, group)
    scales = divide_float32(x.abs().amax(-1).clamp(min=SMALLEST), INT4_MOST)
    codes = (x / scales[..., None]).round().clamp(-INT4_MOST, INT4_MOST) + 8
    return _pack(codes), scales


def _nvfp4(weight_NK: torch.Tensor, group: int, largest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """16 columns share an e4m3 scale, and a matrix a float32 scale of those."""
    x = _split_groups(weight_NK, group)
    of_group = x.abs().amax(-1).clamp(min=SMALLEST)
    largest = largest.clamp(min=SMALLEST)
    # By the group's maximum, not by its rounded scale, with ties up in magnitude, as in the
    # published test vectors. The rounded scale, with ties down, is another convention.
    scaled = (x * (x.new_full((), E2M1_MOST) / of_group)[..., None]).clamp(-E2M1_MOST, E2M1_MOST)
    scales = (of_group / largest * E4M3_MOST).clamp(max=E4M3_MOST).to(torch.float8_e4m3fn)
    return _pack(_e2m1(scaled)), scales, nvfp4_global_scales(largest)


def nvfp4_global_scales(largest: torch.Tensor) -> torch.Tensor:
    """The float32 scale of a matrix: 448 times 6 of it is the absolute maximum."""
    return divide_float32(largest.clamp(min=SMALLEST), E2M1_MOST * E4M3_MOST).contiguous()


def _mxfp4(weight_NK: torch.Tensor, group: int, _: Any) -> tuple[torch.Tensor, ...]:
    """32 columns share a power of two (e8m0). Ties are rounded up in magnitude. A group with
    numbers that are not finite has a scale of NaN."""
    x = _split_groups(weight_NK, group)
    # SMALLEST is about 2^-40, so that the biased exponent stays far above 2.
    exponent = x.abs().amax(-1).clamp(min=SMALLEST).view(torch.int32) >> 23 & 255
    # The maximum's power of two divided by 4, the one in 6 (OCP Microscaling 1.0, section 6.3).
    # 255 is e8m0's NaN; 6, the largest E2M1 number, has exponent 2 (OCP Microscaling 1.0, 6.3).
    biased = torch.where(exponent == 255, 255, exponent - 2)
    scales = biased.to(torch.uint8).view(torch.float8_e8m0fnu)
    scaled = (x / scales.float()[..., None]).clamp(-E2M1_MOST, E2M1_MOST)
    return _pack(_e2m1(scaled.nan_to_num())), scales


def _e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes of numbers from -6 to 6. OCP Microscaling Formats 1.0; ties up in magnitude."""
    size = x.abs()
    fine = (2 * size + 0.5).int().clamp(max=3)
    # Levels up to 2 are 0.5 apart; the bounds are midpoints of 1.5, 2, 3, 4 and 6.
    coarse = 4 + (size >= 2.5).int() + (size >= 3.5).int() + (size >= 5.0).int()
    return torch.where(size >= 1.75, coarse, fine) + 8 * (x < 0).int()


def _int8(weight_NK: torch.Tensor, _: Any, largest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A scale for each row. Halves are rounded to even."""
    scales = int8_scales(largest)
    codes = (weight_NK.float() / scales).round().clamp(-INT8_MOST, INT8_MOST)
    return codes.to(torch.int8).view(torch.uint8), scales


def int8_scales(largest: torch.Tensor) -> torch.Tensor:
    """The quantization step."""
    return divide_float32(largest.clamp(min=SMALLEST), INT8_MOST)


def _fp8(weight_NK: torch.Tensor, _: Any, largest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scales = fp8_scales(largest).contiguous()
    return _cast_to_e4m3(weight_NK.float() / scales), scales


def _block_fp8(
    weight_NK: torch.Tensor, group: int, largest: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Tiles of 128 x 128 share a scale, as in DeepSeek-V3; those at a matrix's last rows and
    columns may be smaller. `largest` [..., N, G] are those of the tile of each row's group.
    """
    scales = fp8_scales(largest).contiguous()
    scaled = (_split_groups(weight_NK, group) / scales[..., None]).flatten(-2)
    return _cast_to_e4m3(scaled[..., : weight_NK.shape[-1]]).contiguous(), scales


def fp8_scales(largest: torch.Tensor) -> torch.Tensor:
    """Scales that map the maxima to the largest value of e4m3."""
    return divide_float32(largest, E4M3_MOST).clamp(min=SMALLEST)


def _cast_to_e4m3(scaled: torch.Tensor) -> torch.Tensor:
    """The nearest e4m3 to each number, ties to even, as bytes."""
    return scaled.clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn).view(torch.uint8)


_QUANTIZE: Mapping[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "nf4": _nf4,
    "nvfp4": _nvfp4,
    "mxfp4": _mxfp4,
    "int4": _int4,
    "int8": _int8,
    "fp8": _fp8,
    "block_fp8": _block_fp8,
}


def _split_groups(weight_K: torch.Tensor, group: int) -> torch.Tensor:
    """[..., K] as float32 [..., G, group]; the last group is filled with zeros."""
    missing = -weight_K.shape[-1] % group
    numbers = weight_K.float()
    # F.pad copies also where there is nothing to pad.
    if missing:
        numbers = F.pad(numbers, (0, missing))
    return numbers.unflatten(-1, (-1, group))


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes below 16, [..., G, group], as uint8 [..., G * group / 2]: the first in the low bits."""
    flat = codes.to(torch.uint8).flatten(-2)
    return flat[..., 0::2] | flat[..., 1::2] << 4


def _unpack(packed: torch.Tensor, levels: tuple[float, ...]) -> torch.Tensor:
    """The level that each code stands for, float32 [..., 2 * bytes]."""
    table = torch.tensor(levels, device=packed.device)
    # A byte looks up two levels at once.
    pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], dim=-1)
    return F.embedding(packed.int(), pairs).flatten(-2)
