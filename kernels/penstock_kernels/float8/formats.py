"""The two FP8 formats, and power-of-two scales.

Power-of-two scales make scaling exact, so values are rounded once and quantization is idempotent.
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
    """The smallest powers of two, float32, that bring the maxima into the range of `kind`.

    NaN for non-finite maxima, so that they are not hidden.
    """
    bits = largest.float().view(torch.int32)
    # The largest value is 1.75 times a power of two: a larger fraction needs the next power.
    exponent = (bits >> 23) - EXPONENTS[kind] + ((bits & FRACTION) > THREE_QUARTERS).int()
    # Exponent 0 is that of subnormal numbers, which GPUs may take for zero.
    scales = (exponent.clamp(min=1) << 23).view(torch.float32)
    return torch.where(largest.isfinite(), scales, torch.nan)


def cast_to_fp8(scaled: torch.Tensor, kind: Kind) -> torch.Tensor:
    """The nearest values of `kind`, ties to even; saturates at its largest value."""
    return scaled.clamp(-MOST[kind], MOST[kind]).to(DTYPES[kind])
