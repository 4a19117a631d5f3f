"""dropout on Triton: the mask is computed in registers, forward and backward, and never stored."""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from penstock_kernels.dropout.reference import dropping, keep_threshold
from penstock_kernels.launch_sizes import cdiv
from penstock_kernels.rng_rows import WORD

GROUPS = 256
"""Groups of four features in a program: one draw makes four words."""


# Triton compiles another program for integers that are 1 or divisible by 16, as words may be.
@triton.jit(do_not_specialize=["key_low", "key_high", "least", "first"])
def _drop(
    x_ptr, places_ptr, y_ptr, F, first, least, scale, key_low, key_high, GROUPS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(places_ptr + row)
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    # Words are passed as signed integers, so that all launches have the same types.
    key_low = key_low.to(tl.uint32, bitcast=True).to(tl.uint64)
    key_high = key_high.to(tl.uint32, bitcast=True).to(tl.uint64)
    first_group = first // 4 + tl.program_id(1) * GROUPS
    group = (first_group + tl.arange(0, GROUPS)).to(tl.uint32)
    zero = group * 0
    w0, w1, w2, w3 = tl.philox((key_high << 32) | key_low, group, zero + low, zero + high, zero)
    # Features of a group are contiguous.
    random = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    offs = first_group * 4 + tl.arange(0, 4 * GROUPS) - first
    inside = (offs >= 0) & (offs < F)
    x = tl.load(x_ptr + row * F + offs, mask=inside, other=0).to(tl.float32)
    stays = random >= least.to(tl.uint32, bitcast=True)
    tl.store(y_ptr + row * F + offs, tl.where(stays, x * scale, 0.0), mask=inside)


def drop(
    x_TF: torch.Tensor, places_T: torch.Tensor, rate: float, key: int, first_feature: int
) -> torch.Tensor:
    """Bitwise identical to the reference."""
    x_TF, places_T = x_TF.contiguous(), places_T.contiguous()
    y_TF = torch.empty_like(x_TF)
    T, F = x_TF.shape
    # Of the full tensor: a shard that begins or ends within a group draws for all of it.
    groups = -(-(first_feature + F) // 4) - first_feature // 4
    if x_TF.numel():
        least, low, high = map(_signed, (keep_threshold(rate), key & WORD, key >> 32))
        numbers = F, first_feature, least, 1 / (1 - rate), low, high
        _drop[(T, cdiv(groups, GROUPS))](x_TF, places_T, y_TF, *numbers, GROUPS=GROUPS)
    return y_TF


dropout = dropping("triton", drop)


def _signed(uint32: int) -> int:
    return uint32 - 2**32 if uint32 >= 2**31 else uint32
