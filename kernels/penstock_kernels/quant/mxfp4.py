"""MXFP4: 32 columns share a power of two (e8m0). OCP Microscaling Formats 1.0, section 6.3.

The scale of a group is the power of two in its absolute maximum, divided by 4, the power of two in
6. Ties are rounded up in magnitude, as for NVFP4.
"""

import torch

from penstock_kernels.quant.nvfp4 import e2m1
from penstock_kernels.quant.packing import pack, split_groups
from penstock_kernels.quant.scales import E2M1_MOST, SMALLEST

GROUP = 32


def quantize(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of [..., N, K]. A group with numbers that are not finite has a scale of
    NaN."""
    x = split_groups(weight_NK, GROUP)
    scales = e8m0_scales(x.abs().amax(-1))
    scaled = (x / scales.float()[..., None]).clamp(-E2M1_MOST, E2M1_MOST)
    return pack(e2m1(scaled.nan_to_num())), scales


def e8m0_scales(largest: torch.Tensor) -> torch.Tensor:
    """The scales of groups with these absolute maxima."""
    # SMALLEST is about 2^-40, so that the biased exponent stays far above 2.
    exponent = largest.clamp(min=SMALLEST).view(torch.int32) >> 23 & 255
    biased = torch.where(exponent == 255, 255, exponent - 2)
    return biased.to(torch.uint8).view(torch.float8_e8m0fnu)
