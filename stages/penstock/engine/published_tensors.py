"""The layouts of quantised matrices that have a row of a tensor for each of their rows.

Those of FP8 in tiles (`fp8`), ModelOpt and compressed-tensors. They differ in what tensors are
called and in whether a scale of the matrix is multiplied or divided by. N rows and K columns of a
matrix, G groups of a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from penstock.engine.safetensors_folder import SafetensorsFolder
from penstock.models.published import TILE, Publisher, malformed
from penstock_kernels.quant import Format, Quantised
from penstock_kernels.quant.published import nvfp4_of_modelopt, of_fp8_tiles

CODES = {
    "block_fp8": torch.float8_e4m3fn,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.int32,
    "nvfp4": torch.uint8,
}
"""What codes are stored as, two of four bits to a byte."""

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Names:
    """What scales are called: what follows the name of their weight."""

    scales: str
    whole: str
    """One number for the matrix."""
    whole_is: Literal["multiplied", "divided by"] = "multiplied"


NAMES: Mapping[Publisher, Names] = {
    "fp8": Names("_scale_inv", ""),
    "modelopt": Names("_scale", "_scale_2"),
    "compressed-tensors": Names("_scale", "_global_scale", "divided by"),
}

PACKED = "_packed"
"""Follows the name of a weight of which compressed-tensors stores several numbers in one."""


@dataclass(frozen=True)
class InRows:
    """Reads one format of one publisher."""

    format: Format
    publisher: Publisher

    def is_quantised(self, folder: SafetensorsFolder, name: str) -> bool:
        """Whether this weight is stored quantised."""
        codes = self.codes_of(name)
        return codes in folder and folder.stored(codes).dtype not in FLOATS

    def codes_of(self, name: str) -> str:
        """The tensor that holds a weight's codes."""
        is_packed = self.publisher == "compressed-tensors" and self.format.codes == "levels"
        return f"{name}{PACKED}" if is_packed else name

    def shape(self, folder: SafetensorsFolder, name: str) -> tuple[int, int]:
        """(N, K) of a weight. Raises CapabilityError if its codes are none of the format."""
        codes, kept = self.codes_of(name), self.format
        if codes not in folder:
            raise malformed(codes, "it is not there")
        stored = folder.stored(codes)
        if stored.dtype != CODES[kept.name] or len(stored.shape) != 2:
            raise malformed(
                codes,
                f"it is {stored.dtype} {stored.shape}, and {kept.name} is {CODES[kept.name]} of "
                "rows and columns",
            )
        rows, width = stored.shape
        if kept.codes != "levels":
            return rows, width
        columns = 2 * width * stored.dtype.itemsize
        assert kept.group is not None
        if columns % kept.group:
            raise malformed(codes, f"rows of {columns} columns are not groups of {kept.group}")
        return rows, columns

    def rows(self, folder: SafetensorsFolder, name: str, first: int, end: int) -> Quantised:
        """Rows `first` to `end` of a weight, on the CPU.

        Raises:
            CapabilityError: a tensor is missing, or is not of the format.
        """
        whole, wanted = self.shape(folder, name), range(first, end)
        self._require_no_more(folder, name)
        codes_name, names, kept = self.codes_of(name), NAMES[self.publisher], self.format
        width = folder.stored(codes_name).shape[1]
        codes = folder.box(codes_name, (first, 0), (len(wanted), width)).view(torch.uint8)
        if kept.tile_rows > 1:
            tall, wide = TILE
            tiles = range(first // tall, -(-end // tall))
            grid = (-(-whole[0] // tall), -(-whole[1] // wide))
            return of_fp8_tiles(codes, _rows(folder, name + names.scales, grid, tiles), first)
        grid = (whole[0], kept.num_groups(whole[1]))
        if kept.scales == "e4m3":
            dtypes = (torch.float8_e4m3fn,)
            scales = _rows(folder, name + names.scales, grid, wanted, dtypes)
            of_all = _one(folder, name + names.whole)
            if names.whole_is == "divided by":
                of_all = of_all.reciprocal()
            return nvfp4_of_modelopt(codes, scales, of_all)
        if kept.group is None and _is_one(folder, name + names.scales):
            scales = _one(folder, name + names.scales).expand(len(wanted), 1).contiguous()
        else:
            scales = _rows(folder, name + names.scales, grid, wanted).float()
        return Quantised(kept, whole[1], codes, scales)

    def _require_no_more(self, folder: SafetensorsFolder, name: str) -> None:
        """Refuse a weight that is more than codes and scales."""
        if self.publisher != "compressed-tensors":
            return
        if (order := f"{name}_g_idx") in folder:
            raise malformed(order, "columns are in another order, and those in their own are read")
        zero = f"{name}_zero_point"
        if zero in folder and folder[zero].flatten().view(torch.uint8).any():
            raise malformed(zero, "it is not zero, and weights without zero points are read")


def _rows(
    folder: SafetensorsFolder,
    name: str,
    shape: tuple[int, int],
    rows: range,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
) -> torch.Tensor:
    """Rows of scales, all of which are to have this shape."""
    if name not in folder:
        raise malformed(name, "it is not there")
    stored = folder.stored(name)
    if stored.shape != shape or stored.dtype not in dtypes:
        wanted = " or ".join(map(str, dtypes))
        raise malformed(name, f"it is {stored.dtype} {stored.shape}, and would be {wanted} {shape}")
    return folder.box(name, (rows.start, 0), (len(rows), shape[1]))


def _is_one(folder: SafetensorsFolder, name: str) -> bool:
    return name in folder and folder.stored(name).shape in ((), (1,), (1, 1))


def _one(folder: SafetensorsFolder, name: str) -> torch.Tensor:
    """The one number of a tensor, float32 [1]."""
    if not _is_one(folder, name):
        raise malformed(name, "it is not there" if name not in folder else "it is not one number")
    return folder[name].reshape(1).float()
