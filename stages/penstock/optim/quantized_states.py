"""AdamW's two moments in few bits, as checkpoints may hold them. No update is computed here.

The first moment is kept in steps that are a share of the largest number of its block. The second,
whose numbers lie magnitudes apart and divide the update, is kept as logarithms between the block's
lowest and highest, so that each is off by a bounded factor; 0 stays 0. N numbers in blocks of
BLOCK, the last of which may have fewer.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

Form = Literal["int8", "int4"]
Moment = Literal["first", "second"]

MOMENTS: Mapping[str, Moment] = {"exp_avg": "first", "exp_avg_sq": "second"}
"""The names that AdamW gives them."""

BLOCK = 128
"""Numbers that share a scale. Even, so that a block is whole bytes in 4 bits."""

AT_ONCE = BLOCK << 17
"""Numbers that are in work at a time: in fp32 some of them take less than a large matrix."""

LEVELS: Mapping[Form, int] = {"int8": 255, "int4": 15}
"""The highest code."""


class Compressed(NamedTuple):
    """N numbers."""

    codes: torch.Tensor
    """uint8 [N], in 4 bits [ceil(N / 2)] with the earlier number in the low half."""
    scales: torch.Tensor
    """fp32 [ceil(N / BLOCK), 2]: what codes begin at, and the step from one to the next."""


def quantize_states(values: torch.Tensor, moment: Moment, form: Form) -> Compressed:
    """Any number of numbers of any shape, computed in fp32 on their device. Those of a second
    moment must be at least 0. A block with one that is not finite becomes one that is not."""
    parts = values.detach().reshape(-1).split(AT_ONCE)
    codes, scales = zip(*(_compressed(part, moment, form) for part in parts), strict=True)
    return Compressed(torch.cat(codes), torch.cat(scales))


def dequantize_states(
    compressed: Compressed, count: int, moment: Moment, form: Form
) -> torch.Tensor:
    """The numbers that `count` were compressed to, fp32 [count]."""
    codes_N, scales_K2 = compressed
    if form == "int4":
        codes_N = torch.stack([codes_N & 15, codes_N >> 4], dim=1).view(-1)[:count]
    codes_KB = _in_blocks(codes_N)
    first_K1, step_K1 = scales_K2.split(1, dim=1)
    values_KB = codes_KB.float().mul_(step_K1).add_(first_K1)
    if moment == "second":
        values_KB = values_KB.exp2_().masked_fill_(codes_KB == 0, 0)
    return values_KB.view(-1)[:count]


def size_in(form: Form, count: int) -> tuple[int, int]:
    """Bytes of codes, and blocks, of so many numbers."""
    return (count if form == "int8" else -(-count // 2)), -(-count // BLOCK)


def _compressed(flat_N: torch.Tensor, moment: Moment, form: Form) -> Compressed:
    of_blocks = _of_first if moment == "first" else _of_second
    codes_KB, scales_K2 = of_blocks(_in_blocks(flat_N.float()), LEVELS[form])
    codes_N = codes_KB.view(-1)[: len(flat_N)]
    if form == "int4":
        even_N = F.pad(codes_N, (0, len(codes_N) % 2))
        codes_N = even_N[::2] | even_N[1::2] << 4
    return Compressed(codes_N.contiguous(), scales_K2)


def _in_blocks(flat_N: torch.Tensor) -> torch.Tensor:
    return F.pad(flat_N, (0, -len(flat_N) % BLOCK)).view(-1, BLOCK)


def _of_first(blocks_KB: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    # As many steps below 0 as above it, so that 0 stays 0.
    half = levels // 2
    step_K1 = _steps(blocks_KB.abs().amax(1, keepdim=True) / half)
    codes_KB = (blocks_KB * _inverse(step_K1)).round_().add_(half)
    return codes_KB.to(torch.uint8), torch.cat([-half * step_K1, step_K1], dim=1)


def _of_second(blocks_KB: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    logs_KB, is_zero_KB = blocks_KB.log2(), blocks_KB == 0
    high_K1 = logs_KB.amax(1, keepdim=True)
    low_K1 = logs_KB.masked_fill_(is_zero_KB, torch.inf).amin(1, keepdim=True)
    # A block of zeros alone has neither.
    is_nothing_K1 = is_zero_KB.all(1, keepdim=True)
    low_K1, high_K1 = (each.masked_fill(is_nothing_K1, 0) for each in (low_K1, high_K1))
    step_K1 = _steps((high_K1 - low_K1) / (levels - 1))
    # Code 0 is the number 0, and 1 the lowest; what is no number has a code all the same.
    codes_KB = logs_KB.sub_(low_K1).mul_(_inverse(step_K1)).round_().add_(1).nan_to_num_(1.0)
    codes_KB.masked_fill_(is_zero_KB, 0)
    return codes_KB.to(torch.uint8), torch.cat([low_K1 - step_K1, step_K1], dim=1)


def _steps(steps_K1: torch.Tensor) -> torch.Tensor:
    """Those too small to be divided by are none."""
    return steps_K1.masked_fill(steps_K1 < torch.finfo(steps_K1.dtype).tiny, 0)


def _inverse(steps_K1: torch.Tensor) -> torch.Tensor:
    return torch.where(steps_K1 > 0, 1 / steps_K1, 0.0)
