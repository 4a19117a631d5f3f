"""block_fp8: tiles of 128 x 128 share a float32 scale, values are e4m3. DeepSeek-V3's layout.

Tiles at a matrix's last rows and columns may be smaller.
"""

import torch

from penstock_kernels.quant.fp8 import cast_to_fp8, compute_scales
from penstock_kernels.quant.packing import split_groups

TILE = 128


def quantize(weight_NK: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., N, K] and scales [..., N, G] of [..., N, K].

    Given the largest magnitude [..., N, G] of the tile that each row's group lies in.
    """
    scales = compute_scales(largest).contiguous()
    scaled = split_groups(weight_NK, TILE) / scales[..., None]
    return cast_to_fp8(scaled.flatten(-2)[..., : weight_NK.shape[-1]]).contiguous(), scales
