"""Read pre-quantized checkpoints whose tensors have one row per matrix row.

FP8 in tiles (`fp8`), ModelOpt and compressed-tensors. They differ in tensor names and in whether
the matrix's global scale multiplies or divides. N rows and K columns of a matrix, G groups of a
row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from penstock.core.errors import CapabilityError
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.quantization.bitsandbytes_nf4 import Nf4, group_in
from penstock.engine.quantization.mxfp4 import Mxfp4
from penstock.models.quantization_config import (
    FP8_BLOCK_SHAPE,
    UNQUANTIZED_HINT,
    QuantizationConfig,
    QuantMethod,
    malformed,
    parse_quantization_config,
)
from penstock_kernels.quant import Format, QuantizedTensor, get_format
from penstock_kernels.quant.published_layouts import nvfp4_of_modelopt, of_fp8_tiles

# The dtype of stored codes; 4-bit codes are packed in pairs.
CODES = {
    "block_fp8": torch.float8_e4m3fn,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.int32,
    "nvfp4": torch.uint8,
}

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# e8m0 is an exponent alone: a power of two.
SCALES = (*FLOATS, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class Names:
    """The suffixes of scale tensors after the weight's name."""

    scales: str
    # One scale for the whole matrix.
    global_scale: str
    global_scale_is: Literal["multiplied", "divided by"] = "multiplied"


NAMES: Mapping[QuantMethod, Names] = {
    "fp8": Names("_scale_inv", ""),
    "modelopt": Names("_scale", "_scale_2"),
    "compressed-tensors": Names("_scale", "_global_scale", "divided by"),
}

PACKED = "_packed"


@dataclass(frozen=True)
class RowwiseFormat:
    """Reads one format of one publisher."""

    format: Format
    publisher: QuantMethod

    def is_quantized(self, folder: SafetensorsFolder, name: str) -> bool:
        """Whether this weight is stored quantized, whatever the config says."""
        codes = self.codes_tensor_name(name)
        return codes in folder and folder.stored(codes).dtype not in FLOATS

    def codes_tensor_name(self, name: str) -> str:
        is_packed = self.publisher == "compressed-tensors" and self.format.codes == "levels"
        return f"{name}{PACKED}" if is_packed else name

    def shape(self, folder: SafetensorsFolder, name: str) -> tuple[int, int]:
        """(N, K) of a weight. Raises CapabilityError if its codes are malformed."""
        codes, format = self.codes_tensor_name(name), self.format
        if codes not in folder:
            raise malformed(codes, "it is not there")
        stored = folder.stored(codes)
        if stored.dtype != CODES[format.name] or len(stored.shape) != 2:
            raise malformed(
                codes,
                f"it is {stored.dtype} {stored.shape}, and {format.name} is {CODES[format.name]} "
                "of rows and columns",
            )
        rows, width = stored.shape
        if format.codes != "levels":
            return rows, width
        # Two codes in a byte, and four bytes in a word of int4.
        columns = 2 * width * stored.dtype.itemsize
        assert format.group is not None
        if columns % format.group:
            raise malformed(codes, f"rows of {columns} columns are not groups of {format.group}")
        return rows, columns

    def rows(self, folder: SafetensorsFolder, name: str, first: int, end: int) -> QuantizedTensor:
        """Rows `first` to `end` of a weight, on the CPU; reads only their bytes. Raises
        CapabilityError if a tensor is missing or malformed."""
        full_shape, row_range = self.shape(folder, name), range(first, end)
        self._require_no_more(folder, name)
        codes_name, names, format = self.codes_tensor_name(name), NAMES[self.publisher], self.format
        width = folder.stored(codes_name).shape[1]
        codes = folder.box(codes_name, (first, 0), (len(row_range), width)).view(torch.uint8)
        if format.tile_rows > 1:
            tall, wide = FP8_BLOCK_SHAPE
            tiles = range(first // tall, -(-end // tall))
            grid = (-(-full_shape[0] // tall), -(-full_shape[1] // wide))
            return of_fp8_tiles(codes, _rows(folder, name + names.scales, grid, tiles), first)
        grid = (full_shape[0], format.num_groups(full_shape[1]))
        if format.scales == "e4m3":
            dtypes = (torch.float8_e4m3fn,)
            scales = _rows(folder, name + names.scales, grid, row_range, dtypes)
            of_all = _one(folder, name + names.global_scale)
            if names.global_scale_is == "divided by":
                of_all = of_all.reciprocal()
            return nvfp4_of_modelopt(codes, scales, of_all)
        if format.group is None and _is_one(folder, name + names.scales):
            # One scale for the matrix is that of each row.
            scales = _one(folder, name + names.scales).expand(len(row_range), 1).contiguous()
        else:
            scales = _rows(folder, name + names.scales, grid, row_range).float()
        return QuantizedTensor(format, full_shape[1], codes, scales)

    def _require_no_more(self, folder: SafetensorsFolder, name: str) -> None:
        if self.publisher != "compressed-tensors":
            return
        if (order := f"{name}_g_idx") in folder:
            raise malformed(order, "columns are in another order, and those in their own are read")
        zero = f"{name}_zero_point"
        # As bytes: zero points may be packed.
        if zero in folder and folder[zero].flatten().view(torch.uint8).any():
            raise malformed(zero, "it is not zero, and weights without zero points are read")


def _rows(
    folder: SafetensorsFolder,
    name: str,
    shape: tuple[int, int],
    rows: range,
    dtypes: tuple[torch.dtype, ...] = SCALES,
) -> torch.Tensor:
    if name not in folder:
        raise malformed(name, "it is not there")
    stored = folder.stored(name)
    if stored.shape != shape or stored.dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        raise malformed(
            name, f"it is {stored.dtype} {stored.shape}, and would be {expected} {shape}"
        )
    return folder.box(name, (rows.start, 0), (len(rows), shape[1]))


def _is_one(folder: SafetensorsFolder, name: str) -> bool:
    return name in folder and folder.stored(name).shape in ((), (1,), (1, 1))


def _one(folder: SafetensorsFolder, name: str) -> torch.Tensor:
    """The single value of a tensor, float32 [1]."""
    if not _is_one(folder, name):
        raise malformed(name, "it is not there" if name not in folder else "it is not one number")
    return folder[name].reshape(1).float()


@dataclass(frozen=True)
class PrequantizedFormat:
    """How a checkpoint's matrices are already quantized."""

    declared: QuantizationConfig
    format: Format

    @property
    def is_stacked(self) -> bool:
        """Whether one tensor has the matrices of all experts; see mxfp4.py."""
        return self.declared.quant_method == "mxfp4"

    @cached_property
    def reader(self) -> RowwiseFormat | Nf4 | Mxfp4:
        """Reads matrices in the layout of the library that wrote them."""
        if self.is_stacked:
            return Mxfp4()
        if self.declared.quant_method == "bitsandbytes":
            return Nf4(self.format)
        return RowwiseFormat(self.format, self.declared.quant_method)


def published_in(
    hf_config: Mapping[str, Any], folder: Path | None = None
) -> PrequantizedFormat | None:
    """The format of a pre-quantized model; None if it is not quantized.

    `folder`, which holds the weights, provides what config.json lacks: ModelOpt's own file, and the
    block size of bitsandbytes NF4 (64 without a folder).

    Raises:
        CapabilityError: the quantization format is not supported.
    """
    declared = parse_quantization_config(hf_config, folder)
    if declared is None:
        return None
    if folder and declared.quant_method == "bitsandbytes":
        with SafetensorsFolder(folder) as tensors:
            declared = replace(declared, group_size=group_in(tensors))
    try:
        format = get_format(declared.format, declared.group_size)
    except ValueError as error:
        raise CapabilityError(f"quantization_config: {error}.\n  {UNQUANTIZED_HINT}.") from error
    return PrequantizedFormat(replace(declared, group_size=format.group), format)
