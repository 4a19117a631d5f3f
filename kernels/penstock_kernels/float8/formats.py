"""The two kinds of float8 numbers, and the scales that bring numbers into their range.

A scale is a power of two: to divide by it and to multiply with it is exact, so numbers are rounded
once, and what was rounded is left alone when it is rounded again.
"""

from typing import Literal

import torch

Kind = Literal["e4m3", "e5m2"]
"""Three bits of fraction and a range of 2^18, or two and 2^32."""

DTYPES: dict[Kind, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
MOST: dict[Kind, float] = {"e4m3": 448.0, "e5m2": 57344.0}
"""1.75 x 2^8 and 1.75 x 2^15."""

EXPONENTS: dict[Kind, int] = {"e4m3": 8, "e5m2": 15}
FRACTION = 0x7FFFFF
THREE_QUARTERS = 0x600000
"""The bits of a float32's fraction, and of .75 there."""


def compute_scales(largest: torch.Tensor, kind: Kind) -> torch.Tensor:
    """The smallest powers of two, float32, that bring the magnitudes into the range of kind.

    Of what is not finite: no number, so that it is not lost.
    """
    bits = largest.float().view(torch.int32)
    exponent = (bits >> 23) - EXPONENTS[kind] + ((bits & FRACTION) > THREE_QUARTERS).int()
    scales = (exponent.clamp(min=1) << 23).view(torch.float32)
    return torch.where(largest.isfinite(), scales, torch.nan)


def cast_to_fp8(scaled: torch.Tensor, kind: Kind) -> torch.Tensor:
    """The nearest numbers of kind, ties to even; what is beyond its range becomes its largest."""
    return scaled.clamp(-MOST[kind], MOST[kind]).to(DTYPES[kind])
