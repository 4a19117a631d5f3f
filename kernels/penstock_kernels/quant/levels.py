"""Values of 4-bit codes, before scaling. Constants only.

NF4: quantiles of the normal distribution, as published with QLoRA (Dettmers et al., 2023) and used
by bitsandbytes; read as float32. E2M1: OCP Microscaling Formats 1.0, section 5.3.3; bit 3 is the
sign. INT4: the integer plus 8.
"""

from itertools import pairwise

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

NF4_MIDPOINTS = tuple((low + high) / 2 for low, high in pairwise(NF4))
"""Midpoints of neighboring levels, exact here and rounded to float32 where they are compared."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))

INT4 = tuple(float(code - 8) for code in range(16))
