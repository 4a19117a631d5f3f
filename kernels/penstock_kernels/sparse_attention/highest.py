"""The highest scores, and of equal ones those of the lowest index."""

import torch


def highest(scores_CM: torch.Tensor, count: int) -> torch.Tensor:
    """The columns of the `count` highest scores of each row, ascending, int64 [C, count].

    `topk` breaks ties by what else is in the row, so that tokens would attend to other keys in
    another layout. Does not synchronize.
    """
    rows, columns = scores_CM.shape
    # The values of top-k are the same however it breaks ties; only its indices are not.
    least_C1 = scores_CM.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above_CM, equal_CM = scores_CM > least_C1, scores_CM == least_C1
    missing_C1 = count - above_CM.sum(-1, keepdim=True)
    # int32, and in place below: sums of [C, M] are as large as the scores, or larger.
    chosen_CM = above_CM | (equal_CM & (equal_CM.cumsum(-1, dtype=torch.int32) <= missing_C1))
    # Columns that are not chosen go to a slot past the last, which is cut off.
    slot_CM = chosen_CM.cumsum(-1).sub_(1).masked_fill_(~chosen_CM, count)
    column_CM = torch.arange(columns, device=scores_CM.device).expand(rows, -1)
    # Zeros, for a row with NaN fills no slot.
    slots_CS = column_CM.new_zeros((rows, count + 1))
    return slots_CS.scatter_(1, slot_CM, column_CM)[:, :count]
