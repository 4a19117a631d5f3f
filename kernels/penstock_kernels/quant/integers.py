"""int8, a scale for each row, and int4, a scale for each group of a row. Both are symmetric.

Halves are rounded to even.
"""

import torch

from penstock_kernels.quant.packing import pack, split_groups
from penstock_kernels.quant.scales import INT4_MOST, INT8_MOST, SMALLEST, divide_float32


def int8(weight_NK: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of [..., N, K], given the rows' largest magnitudes [..., N, 1]."""
    scales = int8_scales(largest)
    codes = (weight_NK.float() / scales).round().clamp(-INT8_MOST, INT8_MOST)
    return codes.to(torch.int8).view(torch.uint8), scales


def int8_scales(largest: torch.Tensor) -> torch.Tensor:
    """The quantization step."""
    return divide_float32(largest.clamp(min=SMALLEST), INT8_MOST)


def int4(weight_NK: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (the integers plus 8), and scales of [..., N, K]."""
    x = split_groups(weight_NK, group)
    scales = divide_float32(x.abs().amax(-1).clamp(min=SMALLEST), INT4_MOST)
    codes = (x / scales[..., None]).round().clamp(-INT4_MOST, INT4_MOST) + 8
    return pack(codes), scales
