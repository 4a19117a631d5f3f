"""sort_by_expert on Triton: one kernel before PyTorch's sort, and one after it."""

# pyright: reportArgumentType=false

import torch
import triton
import triton.language as tl

from penstock_kernels.custom_op import operator
from penstock_kernels.launch_sizes import cdiv, next_power_of_2
from penstock_kernels.permute.reference import NO_EXPERT, Order, key_dtype

BLOCK = 1024


# R varies by micro-batch, and Triton compiles anew for a multiple of 16.
@triton.jit(do_not_specialize=["R"])
def _keys(choice_ptr, keys_ptr, R, num_experts, BLOCK: tl.constexpr):
    """The expert of each copy; num_experts, which is sorted last, for none."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    choice = tl.load(choice_ptr + offs, mask=offs < R, other=0)
    is_valid = (choice >= 0) & (choice < num_experts)
    tl.store(keys_ptr + offs, tl.where(is_valid, choice, num_experts), mask=offs < R)


@triton.jit
def _ends(keys_ptr, R, expert):
    """How many of the sorted keys are at most `expert`: a binary search of each lane."""
    low = tl.zeros_like(expert).to(tl.int64)
    high = low + R
    # R halved until it is 0: as many steps as a binary search of R keys takes at most.
    step = R
    # A loop of one length for all lanes: a lane whose interval is empty keeps its bounds.
    while step > 0:
        middle = (low + high) // 2
        is_open = low < high
        key = tl.load(keys_ptr + middle, mask=is_open, other=0).to(tl.int64)
        goes_up = is_open & (key <= expert)
        high = tl.where(is_open & ~goes_up, middle, high)
        low = tl.where(goes_up, middle + 1, low)
        step = step // 2
    return low


@triton.jit(do_not_specialize=["R"])
def _order(
    keys_ptr,
    copy_of_row_ptr,
    row_of_copy_ptr,
    counts_ptr,
    R,
    num_experts,
    NONE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The inverse of the order, copies without an expert, and in the last program the counts."""
    if tl.program_id(0) == tl.num_programs(0) - 1:
        expert = tl.arange(0, EXPERTS).to(tl.int64)
        counts = _ends(keys_ptr, R, expert) - _ends(keys_ptr, R, expert - 1)
        tl.store(counts_ptr + expert, counts, mask=expert < num_experts)
    else:
        row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        is_valid = tl.load(keys_ptr + row, mask=row < R, other=0) < num_experts
        copy = tl.load(copy_of_row_ptr + row, mask=row < R, other=0)
        tl.store(row_of_copy_ptr + copy, tl.where(is_valid, row, NONE), mask=row < R)
        tl.store(copy_of_row_ptr + row, tl.where(is_valid, copy, NONE), mask=row < R)


def _sorted(
    choice_TK: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    choice_TK = choice_TK.contiguous()
    R = choice_TK.numel()
    counts_E = choice_TK.new_empty(num_experts, dtype=torch.int64)
    keys_R = choice_TK.new_empty(R, dtype=key_dtype(num_experts))
    blocks = cdiv(R, BLOCK)
    if R:
        _keys[(blocks,)](choice_TK, keys_R, R, num_experts, BLOCK=BLOCK)
    keys_R, copy_of_row = keys_R.sort(stable=True)
    row_of_copy = choice_TK.new_empty(choice_TK.shape, dtype=torch.int64)
    sizes = {"NONE": NO_EXPERT, "EXPERTS": next_power_of_2(num_experts), "BLOCK": BLOCK}
    tensors = keys_R, copy_of_row, row_of_copy, counts_E
    _order[(blocks + 1,)](*tensors, R, num_experts, **sizes)
    return copy_of_row, row_of_copy, counts_E


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
