"""Definition of sort_by_expert, permute and unpermute: the references of other implementations."""

from dataclasses import dataclass

import torch

# Narrow, because a radix sort's cost depends on the width.
SMALL = torch.int16

NO_EXPERT = -1
"""Index for a copy without a row, or a row without a copy."""


@dataclass(frozen=True, eq=False)
class Order:
    """T tokens, K experts per token, R = T * K rows, E experts."""

    copy_of_row: torch.Tensor
    """int64 [R]: which copy each row is, numbered token by token: t * K + k. NO_EXPERT in the last
    rows, as many as there are copies without an expert."""
    row_of_copy: torch.Tensor
    """int64 [T, K]: which row each copy is; NO_EXPERT where it has no expert."""
    counts: torch.Tensor
    """int64 [E]: rows of each expert."""


def key_dtype(num_experts: int) -> torch.dtype:
    """The dtype of expert indices for sorting."""
    return SMALL if num_experts < torch.iinfo(SMALL).max else torch.int64


def sort_by_expert(choice_TK: torch.Tensor, num_experts: int) -> Order:
    """A stable sort by expert: copies of an expert are in the order of their tokens.

    `choice_TK` holds expert indices. An index outside of 0 to `num_experts` - 1 means no expert:
    its copy is in no expert's rows, and adds nothing to its token. No host synchronization.
    """
    is_somebody_TK = (choice_TK >= 0) & (choice_TK < num_experts)
    dtype = key_dtype(num_experts)
    chosen_TK = torch.where(is_somebody_TK, choice_TK, num_experts).to(dtype)
    # By default torch's sort may exchange equal keys, and weight gradients sum an expert's rows in
    # this order.
    sorted_R, copy_of_row = chosen_TK.flatten().sort(stable=True)
    row_of_copy = torch.empty_like(copy_of_row)
    row_of_copy[copy_of_row] = torch.arange(len(copy_of_row), device=copy_of_row.device)
    # Not bincount, which synchronizes with the GPU for its output size.
    experts = torch.arange(num_experts, dtype=dtype, device=choice_TK.device)
    ends_E = torch.searchsorted(sorted_R, experts, right=True)
    return Order(
        copy_of_row.masked_fill(sorted_R == num_experts, NO_EXPERT),
        row_of_copy.view_as(choice_TK).masked_fill(~is_somebody_TK, NO_EXPERT),
        ends_E.diff(prepend=ends_E.new_zeros(1)),
    )


def permute(x_TD: torch.Tensor, order: Order) -> torch.Tensor:
    """A row for every copy of a token, sorted by expert, [R, D]; zeros for rows without a copy."""
    # Copied first: so a token's gradient sums its copies' gradients in one order, on every device.
    copies = x_TD.repeat_interleave(order.row_of_copy.shape[1], dim=0)
    return _taken(copies, order.copy_of_row)


def unpermute(y_RD: torch.Tensor, weights_TK: torch.Tensor | None, order: Order) -> torch.Tensor:
    """The weighted sum of each token's rows; added in fp32, in y's dtype, [T, D].

    Without weights the rows are summed. Rows without a token are never read as numbers.
    """
    copies_TKD = _taken(y_RD, order.row_of_copy.flatten()).unflatten(0, order.row_of_copy.shape)
    copies_TKD = copies_TKD.float()
    if weights_TK is not None:
        copies_TKD = copies_TKD * weights_TK.float().unsqueeze(-1)
    return copies_TKD.sum(1).to(y_RD.dtype)


def _taken(rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The rows of those indices, zeros for NO_EXPERT."""
    # index_select takes no -1. Filled, not multiplied by 0: NaN in the row read instead would stay
    # NaN.
    selected = rows.index_select(0, numbers.clamp(min=0))
    return selected.masked_fill((numbers < 0).unsqueeze(-1), 0)
