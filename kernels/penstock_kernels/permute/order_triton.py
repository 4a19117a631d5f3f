"""sort_by_expert on Triton: a counting sort in two kernels.

The first counts each expert's copies in each block; the second adds up the counts, and ranks the
copies of a block among those of their expert. Copies without an expert have no rank.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl

from penstock_kernels.custom_op import operator
from penstock_kernels.launch_sizes import cdiv, next_power_of_2
from penstock_kernels.permute.reference import NO_EXPERT, Order

BLOCK = 1024
ELEMENTS = 4096
"""Pairs of a copy and an expert that a program compares at a time."""


# R varies by micro-batch, and Triton compiles anew for a multiple of 16.
@triton.jit(do_not_specialize=["R"])
def _tally(
    choice_ptr,
    tally_ptr,
    R,
    num_experts,
    EXPERTS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many copies of a block each expert has."""
    experts = tl.arange(0, EXPERTS)
    tally = tl.zeros([EXPERTS], dtype=tl.int32)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for part in range(0, BLOCK, PART):
        offs = first + part + tl.arange(0, PART)
        choice = tl.load(choice_ptr + offs, mask=offs < R, other=-1)
        tally += tl.sum((choice[:, None] == experts[None, :]).to(tl.int32), axis=0)
    tally_ptrs = tally_ptr + tl.program_id(0) * num_experts + experts
    tl.store(tally_ptrs, tally, mask=experts < num_experts)


@triton.jit(do_not_specialize=["R", "blocks"])
def _order(
    choice_ptr,
    tally_ptr,
    copy_of_row_ptr,
    row_of_copy_ptr,
    counts_ptr,
    R,
    blocks,
    num_experts,
    NONE: tl.constexpr,
    EXPERTS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The order and its inverse of a block's copies, and in the first program the counts."""
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < num_experts
    counts = tl.zeros([EXPERTS], dtype=tl.int32)
    before = tl.zeros([EXPERTS], dtype=tl.int32)
    for block in range(0, blocks, PART):
        numbers = block + tl.arange(0, PART)
        inside = (numbers < blocks)[:, None] & is_expert[None, :]
        offs = numbers[:, None] * num_experts + experts[None, :]
        tally = tl.load(tally_ptr + offs, mask=inside, other=0)
        counts += tl.sum(tally, axis=0)
        is_before = (numbers < tl.program_id(0))[:, None]
        before += tl.sum(tl.where(is_before, tally, 0), axis=0)
    # The row of the block's next copy of each expert.
    next_row = tl.cumsum(counts, axis=0) - counts + before
    num_rows = tl.sum(counts, axis=0)
    if tl.program_id(0) == 0:
        tl.store(counts_ptr + experts, counts, mask=is_expert)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for part in range(0, BLOCK, PART):
        copy = first + part + tl.arange(0, PART)
        choice = tl.load(choice_ptr + copy, mask=copy < R, other=NONE)
        is_own = ((choice[:, None] == experts[None, :]) & is_expert[None, :]).to(tl.int32)
        rank = tl.cumsum(is_own, axis=0) - 1
        row = tl.sum(is_own * (rank + next_row[None, :]), axis=1).to(tl.int64)
        next_row += tl.sum(is_own, axis=0)
        has_expert = (choice >= 0) & (choice < num_experts)
        tl.store(row_of_copy_ptr + copy, tl.where(has_expert, row, NONE), mask=copy < R)
        tl.store(copy_of_row_ptr + row, copy, mask=(copy < R) & has_expert)
        # Rows past the experts' are no copy's: numbered as copies are, each has one writer.
        tl.store(copy_of_row_ptr + copy, NONE, mask=(copy < R) & (copy >= num_rows))


def tile(num_experts: int) -> dict[str, int]:
    """Sizes of both kernels for so many experts."""
    experts = next_power_of_2(num_experts)
    return {"EXPERTS": experts, "PART": min(BLOCK, max(1, ELEMENTS // experts)), "BLOCK": BLOCK}


def _sorted(
    choice_TK: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    order = _sorted_fake(choice_TK, num_experts)
    choice_TK, R, sizes = choice_TK.contiguous(), choice_TK.numel(), tile(num_experts)
    blocks = cdiv(R, BLOCK)
    tally = choice_TK.new_empty(blocks, num_experts, dtype=torch.int32)
    if R:
        _tally[(blocks,)](choice_TK, tally, R, num_experts, **sizes)
    # Without copies, too, there are counts.
    tensors = choice_TK, tally, *order
    _order[(max(blocks, 1),)](*tensors, R, blocks, num_experts, NONE=NO_EXPERT, **sizes)
    return order


def _sorted_fake(
    choice_TK: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    row_of_copy = choice_TK.new_empty(choice_TK.shape, dtype=torch.int64)
    copy_of_row = choice_TK.new_empty(choice_TK.numel(), dtype=torch.int64)
    return copy_of_row, row_of_copy, choice_TK.new_empty(num_experts, dtype=torch.int64)


_sorted_of = operator("sort_by_expert", _sorted, fake=_sorted_fake)


def sort_by_expert(choice_TK: torch.Tensor, num_experts: int) -> Order:
    """Same as the reference."""
    return Order(*_sorted_of(choice_TK, num_experts))
