"""Block-wise FP8 for inference servers: 128 x 128 tiles with one scale each (DeepSeek-V3 format).

A weight becomes FP8 values under its own name, and `<name>_scale_inv`, the factor of each tile. N
rows, K columns.
"""

from collections.abc import Mapping

import torch

from penstock.engine.quantization.select_layers import matrices
from penstock.models.tp_roles import Roles
from penstock.models.weights import WeightMap
from penstock.server.protocol.types import Quantization
from penstock.server.weight_sync.errors import SyncError, refused
from penstock_kernels.quant import FORMATS, quantize
from penstock_kernels.quant.published_layouts import tile_scales

SCALES = "_scale_inv"
# Bytes in fp32 of the rows quantized at a time, which takes several times as much memory.
STRETCH = 4 << 20

SUPPORTED: Mapping[str, tuple[str | int | tuple[int, int], ...]] = {
    "quant_method": ("fp8", "block_fp8"),
    "fmt": ("e4m3",),
    "weight_block_size": ((128, 128), 128, "128", "128x128", "[128, 128]", "128,128"),
    "activation_scheme": ("dynamic",),
}
"""Supported values of `quantization`."""


def wants_fp8(quantization: Quantization | None) -> bool:
    """Whether weights are sent in FP8. Raises SyncError for unsupported settings."""
    if not quantization:
        return False
    for name, value in quantization.items():
        if name not in SUPPORTED:
            raise refused(
                f"quantization.{name} is not known; there are {', '.join(SUPPORTED)}.\n"
                "  Leave it out."
            )
        if value not in SUPPORTED[name] or isinstance(value, bool):
            supported = " or ".join(map(repr, SUPPORTED[name]))
            raise refused(f"quantization.{name} is {value!r}, and weights are sent as {supported}.")
    if "quant_method" not in quantization:
        raise refused("quantization says no quant_method; 'fp8' is sent.")
    return True


def quantized_shapes(names: WeightMap, roles: Roles) -> dict[str, tuple[int, ...]]:
    """The weights that are sent in FP8: linear layers of the blocks, but no embeddings, head, norms
    and router. Raises SyncError for a model that the format does not support."""
    experts = names.config.experts
    if experts and experts.is_stacked:
        raise refused(
            "the model keeps all experts of a layer in one tensor, which no server loads in FP8.\n"
            "  Leave quantization out."
        )
    shapes = names.hf_shapes()
    return {
        name: shapes[name]
        for native, _ in matrices(names, roles)
        for name in names.hf_names(native)
    }


def scales_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The shape of `<name>_scale_inv` for a weight [N, K]."""
    rows, columns = shape
    tall = FORMATS["block_fp8"].tile_rows
    return -(-rows // tall), FORMATS["block_fp8"].num_groups(columns)


def tiles(name: str, weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 e4m3 values [N, K] and fp32 scales of tiles. Raises SyncError for non-finite values."""
    storage = FORMATS["block_fp8"]
    rows, columns = weight_NK.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=weight_NK.device)
    scales = torch.empty(scales_shape((rows, columns)), device=weight_NK.device)
    # A multiple of the tile's rows, so that no tile is cut in two.
    step = max(STRETCH // (4 * columns) // storage.tile_rows, 1) * storage.tile_rows
    for first in range(0, rows, step):
        try:
            quantized = quantize(weight_NK[first : first + step], storage)
        except ValueError as error:
            raise SyncError(
                f"{name}: {error}.\n  The model has diverged; load an earlier checkpoint.",
                step="update",
                code="not_finite",
            ) from error
        codes[first : first + step] = quantized.codes.view(torch.float8_e4m3fn)
        of_tiles = tile_scales(quantized)
        tile = first // storage.tile_rows
        scales[tile : tile + len(of_tiles)] = of_tiles
    return codes, scales
