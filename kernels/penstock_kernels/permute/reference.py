"""Definition of permute and unpermute. The references of every other implementation."""

import torch

from penstock_kernels.permute.order import Order


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
    selected = rows.index_select(0, numbers.clamp(min=0))
    return selected.masked_fill((numbers < 0).unsqueeze(-1), 0)
