"""A quantized matrix, or a stack of them: tensors, slicing and concatenation.

N rows, K columns, B bytes and G groups of a row. Every tensor has the matrices' rows as its
second-to-last dimension and leading dimensions (of experts) before it, and rows are independent:
any range of rows, of one matrix or of several flattened ones, is a quantized matrix as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock_kernels.quant.formats import NF4, Format

STEPS = {
    # From 0 to the smallest value.
    "nvfp4": 0.5,
    "mxfp4": 0.5,
    # Between values from 1 to 2.
    "fp8": 0.125,
    "block_fp8": 0.125,
    # Half of the narrowest gap above 0: the maximum error there.
    "nf4": 0.5 * NF4[8],
    "int8": 0.5,
    "int4": 0.5,
}
"""In units of the scale, by format."""


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """codes times scales (times global_scales): matrices [..., N, K]."""

    format: Format
    columns: int
    """K: codes of fewer columns than whole groups are padded."""
    codes: torch.Tensor
    """uint8 [..., N, B]; with 4-bit codes, the low four bits are the earlier column."""
    scales: torch.Tensor
    """[..., N, G], in the format's dtype."""
    global_scales: torch.Tensor | None = None
    """float32 [..., N, 1], with e4m3 scales."""

    def __post_init__(self) -> None:
        """Validate the tensors.

        Raises:
            ValueError: a tensor is missing, or has another shape or dtype.
        """
        rows, format = self.codes.shape[:-1], self.format
        expected = {
            "codes": (self.codes, torch.uint8, format.row_bytes(self.columns)),
            "scales": (self.scales, format.scales_dtype, format.num_groups(self.columns)),
        }
        if (self.global_scales is None) == (self.format.scales == "e4m3"):
            has = "has" if self.global_scales is None else "has no"
            raise ValueError(
                f"{self.format.name} {has} global scales, and here it is the other way round"
            )
        if self.global_scales is not None:
            expected["global_scales"] = (self.global_scales, torch.float32, 1)
        for name, (tensor, dtype, width) in expected.items():
            if tensor.dtype != dtype or tensor.shape != (*rows, width):
                raise ValueError(
                    f"{name} of {self.format.name} with {self.columns} columns are {dtype} "
                    f"{(*rows, width)}, and these are {tensor.dtype} {tuple(tensor.shape)}"
                )

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrices', [..., N, K]."""
        return (*self.codes.shape[:-1], self.columns)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = {"codes": self.codes, "scales": self.scales}
        if self.global_scales is not None:
            tensors["global_scales"] = self.global_scales
        return tensors

    def float_scales(self) -> torch.Tensor:
        """The factor of each group's values, float32 [..., N, G]."""
        scales = self.scales.float()
        return scales if self.global_scales is None else scales * self.global_scales

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def as_bytes(self) -> dict[str, torch.Tensor]:
        """Its tensors viewed as uint8 [..., N, bytes]: mixed precision does not cast uint8."""
        return {name: tensor.view(torch.uint8) for name, tensor in self.tensors.items()}

    @staticmethod
    def of_bytes(
        format: Format, columns: int, tensors: Mapping[str, torch.Tensor]
    ) -> "QuantizedTensor":
        """The inverse of `as_bytes`, for any range of rows; views, no copies.

        Raises:
            ValueError: a tensor is missing, or is not this format's.
        """
        names = ["codes", "scales", *(["global_scales"] if format.scales == "e4m3" else [])]
        if missing := [name for name in names if name not in tensors]:
            raise ValueError(f"{format.name} has no {' and no '.join(missing)}")
        return QuantizedTensor(
            format,
            columns,
            tensors["codes"],
            tensors["scales"].view(format.scales_dtype),
            tensors["global_scales"].view(torch.float32) if "global_scales" in names else None,
        )

    def narrow(self, dim: int, start: int, length: int) -> "QuantizedTensor":
        """`length` matrices, rows or columns from `start` on, as a view.

        Columns are sliced between groups; with one scale for a row, anywhere.

        Raises:
            ValueError: a slice begins or ends within a group, or outside.
        """
        dim = dim if dim < 0 else dim - len(self.shape)
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise ValueError(
                f"{length} from {start} on are not in the {self.shape[dim]} of dimension {dim}"
            )
        # Rows and matrices are independent, so every tensor is cut alike.
        if dim < -1:
            parts = {name: part.narrow(dim, start, length) for name, part in self.tensors.items()}
            return QuantizedTensor(self.format, self.columns, **parts)
        end, group = start + length, self.format.group
        if group is None:
            return QuantizedTensor(
                self.format, length, self.codes.narrow(-1, start, length), self.scales
            )
        if start % group or (end % group and end != self.columns):
            raise ValueError(
                f"columns {start} to {end} of {self.columns} do not end between groups of "
                f"{group} ({self.format.name}); cut at multiples of {group}, "
                "or cut the matrix before it is quantized"
            )
        first = start // group
        return QuantizedTensor(
            self.format,
            length,
            self.codes.narrow(-1, self.format.row_bytes(start), self.format.row_bytes(length)),
            self.scales.narrow(-1, first, self.format.num_groups(length)),
            self.global_scales,
        )

    def copy_(self, source: "QuantizedTensor") -> None:
        """Copy another's codes and scales, in place: requantizes a parameter or some of its rows.

        Not columns: they may share scales with neighboring columns.

        Raises:
            ValueError: the source has another shape or format.
        """
        if (source.format, source.shape) != (self.format, self.shape):
            raise ValueError(
                f"{source.format.name} {source.shape} does not fit in "
                f"{self.format.name} {self.shape} of groups of {self.format.group}"
            )
        for name, tensor in self.tensors.items():
            tensor.copy_(source.tensors[name])


def step_size(quantized: QuantizedTensor) -> torch.Tensor:
    """The quantization step of each group, float32 [..., N, G]; G is 1 where rows have one scale.
    Noise on quantized weights is in units of it (adaptive quantization noise, AQN)."""
    return quantized.float_scales() * STEPS[quantized.format.name]


def cat(parts: Sequence[QuantizedTensor], dim: int = -2) -> QuantizedTensor:
    """Matrices of one format and width, one after another along rows or a leading dimension.

    Raises:
        ValueError: they differ in format or width, or dim is that of columns.
    """
    first = parts[0]
    if dim in (-1, len(first.shape) - 1):
        raise ValueError("quantized matrices are laid together along rows, not along columns")
    dim = dim if dim < 0 else dim - len(first.shape)
    kinds = {(part.format, part.columns) for part in parts}
    if len(kinds) > 1:
        named = ", ".join(f"{kind.name} of {columns} columns" for kind, columns in kinds)
        raise ValueError(f"quantized matrices of several kinds are not one: {named}")
    tensors = {
        name: torch.cat([part.tensors[name] for part in parts], dim) for name in first.tensors
    }
    return QuantizedTensor(first.format, first.columns, **tensors)
