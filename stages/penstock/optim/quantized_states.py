"""Quantized AdamW states (int8, int4) for checkpoints. No update is computed here.

Block-wise quantization. The first moment is quantized linearly, scaled by its block's absolute
maximum. The second moment spans orders of magnitude and divides the update, so its logarithm is
quantized between the block's minimum and maximum, which bounds the relative error; 0 stays 0. N
values in blocks of BLOCK; the last block may be shorter.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

Form = Literal["int8", "int4"]
Moment = Literal["first", "second"]

MOMENTS: Mapping[str, Moment] = {"exp_avg": "first", "exp_avg_sq": "second"}

# Values per scale. Even, so that a block of 4-bit codes is whole bytes.
BLOCK = 128

# Values processed at a time, so that a few fp32 temporaries take less than a large matrix.
CHUNK = BLOCK << 17

# The highest code.
LEVELS: Mapping[Form, int] = {"int8": 255, "int4": 15}


class Compressed(NamedTuple):
    """N quantized values."""

    codes: torch.Tensor
    """uint8 [N]; for int4 [ceil(N / 2)], with the earlier value in the low 4 bits."""
    scales: torch.Tensor
    """fp32 [ceil(N / BLOCK), 2]: value of code 0 and step size, for each block."""


def quantize_states(values: torch.Tensor, moment: Moment, form: Form) -> Compressed:
    """Quantize values of any shape, in fp32 on their device. Second moments must be at least 0. A
    block with a non-finite value dequantizes to non-finite values."""
    parts = values.detach().reshape(-1).split(CHUNK)
    codes, scales = zip(*(_quantize(part, moment, form) for part in parts), strict=True)
    return Compressed(torch.cat(codes), torch.cat(scales))


def dequantize_states(
    compressed: Compressed, count: int, moment: Moment, form: Form
) -> torch.Tensor:
    """Dequantize `count` values, fp32 [count]."""
    codes_N, scales_K2 = compressed
    if form == "int4":
        codes_N = torch.stack([codes_N & 15, codes_N >> 4], dim=1).view(-1)[:count]
    codes_KB = _to_blocks(codes_N)
    first_K1, step_K1 = scales_K2.split(1, dim=1)
    values_KB = codes_KB.float().mul_(step_K1).add_(first_K1)
    if moment == "second":
        values_KB = values_KB.exp2_().masked_fill_(codes_KB == 0, 0)
    return values_KB.view(-1)[:count]


def size_in(form: Form, count: int) -> tuple[int, int]:
    """(bytes of codes, number of blocks) for `count` values."""
    return (count if form == "int8" else -(-count // 2)), -(-count // BLOCK)


def _quantize(flat_N: torch.Tensor, moment: Moment, form: Form) -> Compressed:
    of_blocks = _quantize_first_moment if moment == "first" else _quantize_second_moment
    codes_KB, scales_K2 = of_blocks(_to_blocks(flat_N.float()), LEVELS[form])
    codes_N = codes_KB.view(-1)[: len(flat_N)]
    if form == "int4":
        even_N = F.pad(codes_N, (0, len(codes_N) % 2))
        codes_N = even_N[::2] | even_N[1::2] << 4
    return Compressed(codes_N.contiguous(), scales_K2)


def _to_blocks(flat_N: torch.Tensor) -> torch.Tensor:
    return F.pad(flat_N, (0, -len(flat_N) % BLOCK)).view(-1, BLOCK)


def _quantize_first_moment(
    blocks_KB: torch.Tensor, levels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    # Symmetric around 0, so that 0 stays exactly 0.
    half = levels // 2
    step_K1 = _steps(blocks_KB.abs().amax(1, keepdim=True) / half)
    codes_KB = (blocks_KB * _inverse(step_K1)).round_().add_(half)
    return codes_KB.to(torch.uint8), torch.cat([-half * step_K1, step_K1], dim=1)


def _quantize_second_moment(
    blocks_KB: torch.Tensor, levels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    logs_KB, is_zero_KB = blocks_KB.log2(), blocks_KB == 0
    high_K1 = logs_KB.amax(1, keepdim=True)
    low_K1 = logs_KB.masked_fill_(is_zero_KB, torch.inf).amin(1, keepdim=True)
    # An all-zero block has no finite minimum or maximum of logarithms.
    is_nothing_K1 = is_zero_KB.all(1, keepdim=True)
    low_K1, high_K1 = (bound.masked_fill(is_nothing_K1, 0) for bound in (low_K1, high_K1))
    step_K1 = _steps((high_K1 - low_K1) / (levels - 1))
    # Code 0 is the value 0, and code 1 the minimum. NaN gets code 1, with non-finite scales.
    codes_KB = logs_KB.sub_(low_K1).mul_(_inverse(step_K1)).round_().add_(1).nan_to_num_(1.0)
    codes_KB.masked_fill_(is_zero_KB, 0)
    return codes_KB.to(torch.uint8), torch.cat([low_K1 - step_K1, step_K1], dim=1)


def _steps(steps_K1: torch.Tensor) -> torch.Tensor:
    # Subnormal step sizes become 0: their inverse would overflow.
    return steps_K1.masked_fill(steps_K1 < torch.finfo(steps_K1.dtype).tiny, 0)


def _inverse(steps_K1: torch.Tensor) -> torch.Tensor:
    return torch.where(steps_K1 > 0, 1 / steps_K1, 0.0)
