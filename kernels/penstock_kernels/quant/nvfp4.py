"""NVFP4: 16 columns share an e4m3 scale, and a matrix a float32 scale of those.

Values are divided by their group's absolute maximum, not by its rounded scale, and ties are rounded
up in magnitude, as in the published test vectors. (Dividing by the rounded scale, with ties down,
is another convention of the same layout.)
"""

import torch

from penstock_kernels.quant.packing import pack, split_groups
from penstock_kernels.quant.scales import E2M1_MOST, E4M3_MOST, SMALLEST, divide_float32

GROUP = 16


def quantize(
    weight_NK: torch.Tensor, largest: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and global scales of [..., N, K], given the largest magnitudes [..., N, 1]."""
    x = split_groups(weight_NK, GROUP)
    of_group = x.abs().amax(-1).clamp(min=SMALLEST)
    largest = largest.clamp(min=SMALLEST)
    scaled = (x * (x.new_full((), E2M1_MOST) / of_group)[..., None]).clamp(-E2M1_MOST, E2M1_MOST)
    scales = (of_group / largest * E4M3_MOST).clamp(max=E4M3_MOST).to(torch.float8_e4m3fn)
    return pack(e2m1(scaled)), scales, global_scales(largest)


def global_scales(largest: torch.Tensor) -> torch.Tensor:
    """The float32 scale of a matrix: 448 times 6 of it is the absolute maximum."""
    return divide_float32(largest.clamp(min=SMALLEST), E2M1_MOST * E4M3_MOST).contiguous()


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes of numbers from -6 to 6. OCP Microscaling Formats 1.0; ties up in magnitude."""
    size = x.abs()
    fine = (2 * size + 0.5).int().clamp(max=3)
    # Levels up to 2 are 0.5 apart; the bounds are midpoints of 1.5, 2, 3, 4 and 6.
    coarse = 4 + (size >= 2.5).int() + (size >= 3.5).int() + (size >= 5.0).int()
    return torch.where(size >= 1.75, coarse, fine) + 8 * (x < 0).int()
