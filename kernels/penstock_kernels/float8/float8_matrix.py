"""A matrix in FP8 with its scales, which are powers of two, and the maxima that they follow from.

Power-of-two scales make scaling exact, so values are rounded once and quantization is idempotent.
Ranks with shards of a matrix reduce maxima over ranks before quantizing; then their codes equal
those of the full matrix.

R rows, C columns (the contracted dimension); B = 128 columns of a group.
"""

from functools import cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from penstock_kernels.op import INTERPRETED

BLOCK = 128

Sharing = Literal["tensor", "rows", "groups", "tiles"]
"""Sharing of scales: the tensor, a row, B columns of a row, or B columns of B rows."""

Sums = Literal["exact", "fast"]
"""Accumulation in float32, or with about 14 bits on Hopper's tensor cores, if available."""

Kind = Literal["e4m3", "e5m2"]
"""Three bits of fraction and a range of 2^18, or two and 2^32."""

DTYPES: dict[Kind, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
MOST: dict[Kind, float] = {"e4m3": 448.0, "e5m2": 57344.0}
"""1.75 x 2^8 and 1.75 x 2^15."""

EXPONENTS: dict[Kind, int] = {"e4m3": 8, "e5m2": 15}
FRACTION = 0x7FFFFF
THREE_QUARTERS = 0x600000
"""The bits of a float32's fraction, and of .75 there."""

CAPABILITY = (8, 9)
"""The first GPUs with FP8."""


class Float8Matrix(NamedTuple):
    """FP8 codes and scales of a matrix."""

    codes: torch.Tensor
    """[R, C] float8, rows one after another."""
    scales: torch.Tensor
    """float32, [1, 1], [R, 1], [R, C / B] or [R / B, C / B], rounded up: codes times these are the
    numbers."""
    sharing: Sharing

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantized matrix [R, C]; exact in float32 and bfloat16."""
        scales = spread(self.scales, self.sharing, *self.codes.shape)
        return self.codes.to(dtype) * scales.to(dtype)


@cache
def has_float8(device: torch.device) -> bool:
    """Whether the GPU computes with FP8; in the interpreter nothing does."""
    return not INTERPRETED and torch.cuda.get_device_capability(device) >= CAPABILITY


def compute_scales(largest: torch.Tensor, kind: Kind) -> torch.Tensor:
    """The smallest powers of two, float32, that bring the maxima into the range of `kind`.

    NaN for non-finite maxima, so that they are not hidden.
    """
    bits = largest.float().view(torch.int32)
    # The largest value is 1.75 times a power of two: a larger fraction needs the next power.
    exponent = (bits >> 23) - EXPONENTS[kind] + ((bits & FRACTION) > THREE_QUARTERS).int()
    # Exponent 0 is that of subnormal numbers, which GPUs may take for zero.
    scales = (exponent.clamp(min=1) << 23).view(torch.float32)
    return torch.where(largest.isfinite(), scales, torch.nan)


def shape_of_scales(sharing: Sharing, rows: int, columns: int) -> tuple[int, int]:
    """Shape of a matrix's scales."""
    across, down = -(-columns // BLOCK), -(-rows // BLOCK)
    shapes = {
        "tensor": (1, 1),
        "rows": (rows, 1),
        "groups": (rows, across),
        "tiles": (down, across),
    }
    return shapes[sharing]


def spread(scales: torch.Tensor, sharing: Sharing, rows: int, columns: int) -> torch.Tensor:
    """The scale of each element, broadcastable to [R, C]."""
    if sharing == "tiles":
        scales = scales.repeat_interleave(BLOCK, 0)[:rows]
    if sharing in ("tiles", "groups"):
        scales = scales.repeat_interleave(BLOCK, 1)[:, :columns]
    return scales


def amax(x_RC: torch.Tensor, sharing: Sharing) -> torch.Tensor:
    """Absolute maxima of [R, C], one for each scale, float32. NaN gives NaN."""
    if not x_RC.numel():
        return x_RC.new_zeros(shape_of_scales(sharing, *x_RC.shape), dtype=torch.float32)
    if sharing == "tensor":
        return _largest(x_RC, (0, 1))
    if sharing == "rows":
        return _largest(x_RC, (1,))
    padded = F.pad(x_RC, (0, -x_RC.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    of_groups = _largest(padded, (2,))[..., 0]
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


def _largest(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    # Not x.abs().amax(), which would write all magnitudes to memory.
    return torch.linalg.vector_norm(x, float("inf"), dim=dims, keepdim=True).float()
