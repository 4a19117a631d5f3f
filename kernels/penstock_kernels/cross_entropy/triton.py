"""The passes on Triton: `tally` reads each logit once, `slope_` reads and writes it once.

`tally` is one program a row, which keeps the running maximum and the sum of exponentials
relative to it (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from penstock_kernels.cross_entropy.loss_terms import LogitGradFactors, LossOptions, SoftmaxStats
from penstock_kernels.launch_sizes import cdiv
from penstock_kernels.tuning import select_config

BLOCK = 4096
WARPS = 8


class Tile(NamedTuple):
    """Logits of a row that a program processes at a time, and its warps."""

    block: int
    warps: int


# What the rule says of slopes, and what is measured beside it. A tally has the rule alone: its sums
# are of as many parts as a block has lanes.
TILES = (Tile(BLOCK, WARPS), Tile(2048, 4), Tile(8192, 8), Tile(8192, 16))

# Bytes of a copy of logits for autotuning `slope_`, which writes in place.
TRIED = 64 << 20

# Below every logit, and finite: the difference of two infinities is NaN.
LEAST = tl.constexpr(-3e38)

# GPUs have an instruction for powers of 2.
LOG2_E = tl.constexpr(1.4426950408889634)

# Logits that a thread loads at once: 16 bytes of bf16.
EACH = tl.constexpr(8)


@triton.jit
def _capped(x, cap):
    # tanh(u) is 2 sigmoid(2 u) - 1, whose exponentials do not overflow.
    return cap * (2 * tl.sigmoid(2 * (x / cap)) - 1)


@triton.jit
def _tally(
    logits_ptr,
    labels_ptr,
    log_sum_ptr,
    target_ptr,
    total_ptr,
    V,
    stride,
    cap,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 64 bits: logits of a whole vocabulary may be more than 2^31 numbers.
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    # EACH logits side by side are one thread's: they share a maximum, and one exponential rescales
    # their sum. Threads are reduced once, in the end.
    largest = tl.full([BLOCK // EACH], LEAST, tl.float32)
    sums = tl.zeros([BLOCK // EACH], tl.float32)
    totals = tl.zeros([BLOCK // EACH], tl.float32)
    lanes = tl.arange(0, BLOCK // EACH)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    for start in range(0, V, BLOCK):
        inside = start + lanes < V
        y = tl.load(logits_ptr + start + lanes, mask=inside, other=float("-inf")).to(tl.float32)
        # The cap turns the -inf of lanes past the vocabulary into a finite -cap.
        if CAPPED:
            y = tl.where(inside, _capped(y, cap), float("-inf"))
        if SMOOTHED:
            totals += tl.sum(tl.where(inside, y, 0.0), axis=1)
        # In base 2, that of the hardware's exponential: `exp` would multiply each number again.
        y *= LOG2_E
        now = tl.maximum(largest, tl.max(y, axis=1))
        sums = sums * tl.exp2(largest - now) + tl.sum(tl.exp2(y - now[:, None]), axis=1)
        largest = now
    most = tl.max(largest, axis=0)
    total = tl.sum(sums * tl.exp2(largest - most), axis=0)
    tl.store(log_sum_ptr + row, (most + tl.log2(total)) / LOG2_E)
    label = tl.load(labels_ptr + row)
    has_label = (label >= 0) & (label < V)
    target = tl.load(logits_ptr + label, mask=has_label, other=0).to(tl.float32)
    if CAPPED:
        target = _capped(target, cap)
    tl.store(target_ptr + row, tl.where(has_label, target, 0.0))
    if SMOOTHED:
        tl.store(total_ptr + row, tl.sum(totals, axis=0))


@triton.jit
def _slope(
    logits_ptr,
    labels_ptr,
    log_sum_ptr,
    share_ptr,
    hit_ptr,
    floor_ptr,
    V,
    stride,
    cap,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < V
    logits_ptr += row * stride
    y = tl.load(logits_ptr + offs, mask=inside, other=float("-inf")).to(tl.float32)
    if CAPPED:
        y = _capped(y, cap)
    grad = tl.exp(y - tl.load(log_sum_ptr + row)) * tl.load(share_ptr + row)
    if SMOOTHED:
        grad -= tl.load(floor_ptr + row)
    # No entry is -1, the label of what another shard has.
    grad = tl.where(offs == tl.load(labels_ptr + row), grad - tl.load(hit_ptr + row), grad)
    if CAPPED:
        # The derivative of cap tanh(x / cap) is 1 - tanh^2, and y / cap is the tanh.
        bent = y / cap
        grad *= 1 - bent * bent
    tl.store(logits_ptr + offs, grad, mask=inside)


def tally(logits_CV: torch.Tensor, labels_C: torch.Tensor, terms: LossOptions) -> SoftmaxStats:
    """Same as the reference."""
    count, width = logits_CV.shape
    log_sum_C = logits_CV.new_empty(count, dtype=torch.float32)
    target_C = torch.empty_like(log_sum_C)
    total_C = torch.empty_like(log_sum_C) if terms.smoothing else None
    if count:
        tensors = logits_CV, labels_C, log_sum_C, target_C, total_C
        _tally[(count,)](
            *(*tensors, width, logits_CV.stride(0), terms.soft_cap or 1.0),
            CAPPED=terms.soft_cap is not None,
            SMOOTHED=total_C is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return SoftmaxStats(log_sum_C, target_C, total_C)


def slope_(
    logits_CV: torch.Tensor,
    labels_C: torch.Tensor,
    log_sum_C: torch.Tensor,
    slopes: LogitGradFactors,
    terms: LossOptions,
) -> None:
    """Same as the reference."""
    count, width = logits_CV.shape
    if not count:
        return

    def launch(logits_CV: torch.Tensor, tile: Tile) -> None:
        _slope[(len(logits_CV), cdiv(width, tile.block))](
            *(logits_CV, labels_C, log_sum_C, *slopes),
            *(width, logits_CV.stride(0), terms.soft_cap or 1.0),
            CAPPED=terms.soft_cap is not None,
            SMOOTHED=slopes.floor is not None,
            BLOCK=tile.block,
            num_warps=tile.warps,
        )

    @cache
    # Cached: every candidate is timed on the same copy, which is made only if any is.
    def some_rows() -> torch.Tensor:
        return logits_CV[: max(1, TRIED // (width * logits_CV.element_size()))].clone()

    kind = "capped" if terms.soft_cap else ""
    tile = select_config(
        _slope, logits_CV, (width,), TILES, lambda tile: launch(some_rows(), tile), kind
    )
    launch(logits_CV, tile)
