"""NF4: each group is divided by its absolute maximum, and each value rounded to a level.

Ties go to the lower level, as in bitsandbytes; scales stay float32 (no double quantization).
"""

import torch

from penstock_kernels.quant.levels import NF4_MIDPOINTS
from penstock_kernels.quant.packing import pack, split_groups
from penstock_kernels.quant.scales import SMALLEST


def quantize(weight_NK: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of [..., N, K]."""
    x = split_groups(weight_NK, group)
    scales = x.abs().amax(-1).clamp(min=SMALLEST)
    midpoints = torch.tensor(NF4_MIDPOINTS, device=x.device)
    # The number of midpoints strictly below.
    return pack(torch.bucketize(x / scales[..., None], midpoints, out_int32=True)), scales
