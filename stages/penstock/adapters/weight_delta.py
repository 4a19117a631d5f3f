"""What an adapter makes of one tensor of its base model, a stretch of rows at a time.

Everything is computed in fp32 and rounded once, to the dtype of the tensor.
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
        """Of the matrix that it is added to."""
        return self.left.shape[0], self.right.shape[1]

    def turned(self) -> "LoraDelta":
        """What is added to the same matrix stored the other way round."""
        return LoraDelta(self.right.T.contiguous(), self.left.T.contiguous(), self.scale)

    def added_to(self, weight: torch.Tensor, start: int) -> torch.Tensor:
        """The sum with rows of the tensor, the first of which is its row `start`; fp32."""
        left = self.left[start : start + len(weight)]
        return torch.addmm(weight.float(), left, self.right, alpha=self.scale)

    def added_alike(self, weight: torch.Tensor, start: int) -> torch.Tensor:
        """The same, with bits that do not depend on which rows and columns are computed together.

        Products of two fp32 numbers are exact in fp64, and here they are added in one order: so it
        does not matter either whether a device rounds between multiplying and adding.
        """
        left = self.left[start : start + len(weight)].double()
        total = torch.zeros_like(weight, dtype=torch.float64)
        for column, row in zip(left.unbind(1), self.right.double(), strict=True):
            total.addcmul_(column.unsqueeze(1), row)
        return total.mul_(self.scale).add_(weight).float()


@dataclass(frozen=True)
class BatchedDelta:
    """Products for matrices of one shape that lie one after another, as the experts of a layer."""

    products: tuple[LoraDelta, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Of all the matrices as one."""
        rows, columns = self.products[0].shape
        return len(self.products) * rows, columns

    def added_to(self, weight: torch.Tensor, start: int) -> torch.Tensor:
        """The sums for whole matrices, the first of which begins at row `start`; fp32."""
        rows = self.products[0].shape[0]
        first = start // rows
        return torch.cat(
            [
                self.products[first + number].added_to(matrix, 0)
                for number, matrix in enumerate(weight.split(rows))
            ]
        )


@dataclass(frozen=True)
class WeightDelta:
    """What becomes of a matrix: a product is added, and then rows or columns are scaled anew."""

    product: LoraDelta | BatchedDelta
    magnitude: torch.Tensor | None = None
    """The norm that each row is given once the product is added (Liu et al. 2024, "DoRA"), or each
    column where `of_columns`; fp32."""
    of_columns: bool = False

    @property
    def needs_all_rows(self) -> bool:
        """Whether rows cannot be computed apart from each other."""
        return self.magnitude is not None and self.of_columns

    def made_of(self, weight: torch.Tensor, start: int = 0) -> torch.Tensor:
        """What becomes of these rows, the first of which is row `start` of the matrix."""
        made = self.product.added_to(weight, start)
        if self.magnitude is not None and self.of_columns:
            made *= self.magnitude / torch.linalg.vector_norm(made, dim=0)
        elif self.magnitude is not None:
            norm = torch.linalg.vector_norm(made, dim=1)
            made *= (self.magnitude[start : start + len(weight)] / norm).unsqueeze(1)
        return made.to(weight.dtype)
