"""Absolute maxima of values that share a scale.

Ranks with shards of a matrix reduce these maxima over ranks before quantizing; then their codes
equal those of the full matrix.
"""

import torch
import torch.nn.functional as F

from penstock_kernels.float8.float8_matrix import BLOCK, Sharing, shape_of_scales


def amax(x_RC: torch.Tensor, sharing: Sharing) -> torch.Tensor:
    """Absolute maxima of [R, C], one for each scale, float32. NaN gives NaN."""
    if not x_RC.numel():
        return x_RC.new_zeros(shape_of_scales(sharing, *x_RC.shape), dtype=torch.float32)
    if sharing == "tensor":
        return _largest(x_RC, (0, 1))
    if sharing == "rows":
        return _largest(x_RC, (1,))
    of_groups = _of_groups(x_RC)
    if sharing == "groups":
        return of_groups
    padded = F.pad(of_groups, (0, 0, 0, -len(of_groups) % BLOCK))
    return padded.unflatten(0, (-1, BLOCK)).amax(1)


def largest_of_part(
    x_RC: torch.Tensor, sharing: Sharing, first_row: int, rows: int
) -> torch.Tensor:
    """Absolute maxima of the rows from `first_row` on of a larger matrix, one for each scale of
    that matrix: zero where this part has no values.
    """
    if sharing == "tensor":
        return amax(x_RC, sharing)
    above = first_row % BLOCK if sharing == "tiles" else 0
    part = amax(F.pad(x_RC, (0, 0, above, 0)), sharing)
    full = part.new_zeros(shape_of_scales(sharing, rows, x_RC.shape[1]))
    if len(x_RC):
        first = first_row // BLOCK if sharing == "tiles" else first_row
        full[first : first + len(part)] = part
    return full


def _of_groups(x_RC: torch.Tensor) -> torch.Tensor:
    padded = F.pad(x_RC, (0, -x_RC.shape[1] % BLOCK))
    return _largest(padded.unflatten(1, (-1, BLOCK)), (2,))[..., 0]


def _largest(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    # Not x.abs().amax(), which would write all magnitudes to memory.
    return torch.linalg.vector_norm(x, float("inf"), dim=dims, keepdim=True).float()
