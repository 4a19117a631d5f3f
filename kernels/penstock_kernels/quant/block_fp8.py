"""block_fp8: tiles of 128 x 128 share a float32 scale, numbers are e4m3. DeepSeek-V3's layout.

Tiles at a matrix's last rows and columns may be smaller.
"""

import torch
import torch.nn.functional as F

from penstock_kernels.quant.fp8 import codes_of, scales_of

TILE = 128


def quantise(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., N, K] and scales [..., N, G] of [..., N, K]: a tile's scale with all its rows."""
    x = weight_NK.float()
    N, K = x.shape[-2:]
    padded = F.pad(x, (0, -K % TILE, 0, -N % TILE))
    tiles = padded.unflatten(-1, (-1, TILE)).unflatten(-3, (-1, TILE))
    of_tile = tiles.abs().amax((-3, -1))
    scales = scales_of(of_tile).repeat_interleave(TILE, -2)[..., :N, :]
    scaled = x / scales.repeat_interleave(TILE, -1)[..., :K]
    return codes_of(scaled), scales.contiguous()
