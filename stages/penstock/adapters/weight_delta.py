"""Applies an adapter to a tensor of its base model, a range of rows at a time.

Everything is computed in fp32 and rounded once, to the tensor's dtype.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LoraDelta:
    """`scale * left @ right`: left [rows, r], right [r, columns], both fp32."""

    left: torch.Tensor
    right: torch.Tensor
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[0], self.right.shape[1]

    def transpose(self) -> "LoraDelta":
        return LoraDelta(self.right.T.contiguous(), self.left.T.contiguous(), self.scale)

    def add_to(self, weight: torch.Tensor, start: int) -> torch.Tensor:
        """`weight` plus the delta, fp32; `weight` is the rows of the matrix from `start` on."""
        left = self.left[start : start + len(weight)]
        return torch.addmm(weight.float(), left, self.right, alpha=self.scale)

    def add_to_reproducibly(self, weight: torch.Tensor, start: int) -> torch.Tensor:
        """Like `add_to`, but bitwise identical for any split into rows and columns.

        Products of two fp32 numbers are exact in fp64, and they are summed in a fixed order. So it
        does not matter whether a device uses fused multiply-add.
        """
        left = self.left[start : start + len(weight)].double()
        total = torch.zeros_like(weight, dtype=torch.float64)
        for column, row in zip(left.unbind(1), self.right.double(), strict=True):
            total.addcmul_(column.unsqueeze(1), row)
        return total.mul_(self.scale).add_(weight).float()


@dataclass(frozen=True)
class BatchedDelta:
    """Deltas of consecutive matrices of one shape, such as the experts of a layer."""

    products: tuple[LoraDelta, ...]

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.products[0].shape
        return len(self.products) * rows, columns

    def add_to(self, weight: torch.Tensor, start: int) -> torch.Tensor:
        """`weight` plus the deltas, fp32; `weight` is whole matrices, the first of which starts at
        row `start`."""
        rows = self.products[0].shape[0]
        first = start // rows
        return torch.cat(
            [
                self.products[first + number].add_to(matrix, 0)
                for number, matrix in enumerate(weight.split(rows))
            ]
        )


@dataclass(frozen=True)
class WeightDelta:
    """The change of a matrix: a delta is added, then rows or columns are rescaled if there are
    magnitudes."""

    product: LoraDelta | BatchedDelta
    magnitude: torch.Tensor | None = None
    """The norm to which each row is rescaled after the addition (DoRA, Liu et al. 2024), or each
    column if `of_columns`; fp32."""
    of_columns: bool = False

    @property
    def needs_all_rows(self) -> bool:
        return self.magnitude is not None and self.of_columns

    def apply_to(self, weight: torch.Tensor, start: int = 0) -> torch.Tensor:
        """The new values of `weight`, the rows of the matrix from `start` on."""
        merged = self.product.add_to(weight, start)
        if self.magnitude is not None and self.of_columns:
            merged *= self.magnitude / torch.linalg.vector_norm(merged, dim=0)
        elif self.magnitude is not None:
            norm = torch.linalg.vector_norm(merged, dim=1)
            merged *= (self.magnitude[start : start + len(weight)] / norm).unsqueeze(1)
        return merged.to(weight.dtype)
