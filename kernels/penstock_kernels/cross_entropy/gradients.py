"""Gradients of the operands of matmuls, accumulated over chunks of tokens.

V rows of a matrix, K its columns, C tokens of a chunk.
"""

import torch

# Bytes of a chunk's contribution at a time on a CPU: it stays in the caches.
ADDED = 2 << 20

# Bytes of a sum that are allocated at once. A C library may not return less than 32 MiB; on a GPU
# each is a launch.
TILE_ON_CPU, TILE_ON_GPU = 48 << 20, 128 << 20

# Bytes in fp32 that are scaled at a time on a CPU, where they are copied.
SCALED = 8 << 20

# What all gradients are multiplied by in fp32, before they are rounded. A scalar tensor is one on a
# GPU, whose value would have to be waited for.
Scale = float | torch.Tensor


def scaled_product_(
    out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: Scale, beta: float = 0
) -> torch.Tensor:
    """`out = beta * out + scale * left @ right`, rounded once.

    With a beta of 0 the old value of `out` is ignored, even NaN. A bf16 product that is multiplied
    by a scale and rounded again is biased: most elements are rounded in the same direction (with
    1/513 they become 1/512 of it).
    """
    if not isinstance(scale, torch.Tensor):
        # Another dtype than the product's is supported on GPUs only.
        kind = {} if out.dtype == left.dtype else {"out_dtype": out.dtype}
        return torch.addmm(out, left, right, **kind, beta=beta, alpha=scale, out=out)
    # `alpha` of `addmm` is a number on the host, for which the device would be waited for.
    product = torch.mm(left, right, out_dtype=torch.float32).mul_(scale)
    return out.mul_(beta).add_(product) if beta else out.copy_(product)


def largest(upstream: torch.Tensor) -> Scale:
    """The absolute maximum, or 1 if all are 0 or there are none: a scale for logit gradients. Equal
    gradients, such as 1/N of each of N tokens, become 1, which bf16 represents exactly.
    """
    if not upstream.numel():
        return 1.0
    amax = upstream.abs().amax()
    amax = amax.where(amax > 0, 1.0)
    # Reading it from a GPU would wait for all that is queued there.
    return amax.item() if upstream.device.type == "cpu" else amax


class WeightGradient:
    """`scale * sum slope.T @ x` over chunks, accumulated in fp32 if there are several.

    An fp32 sum for a 16-bit result is stored in tiles, which are freed as their rows are rounded:
    both are never in memory in full at the same time.
    """

    def __init__(
        self, matrix_VK: torch.Tensor, products: torch.dtype, num_chunks: int, scale: Scale
    ) -> None:
        """`matrix_VK` is the unconverted matrix; `products` is the dtype of logit gradients and
        rows.
        """
        self._matrix_VK, self._scale = matrix_VK, scale
        precise = torch.promote_types(products, torch.float32)
        self._dtype = products if num_chunks == 1 and matrix_VK.dtype == products else precise
        self._whole_VK: torch.Tensor | None = None
        width = max(1, matrix_VK.shape[1])
        self._each = max(1, ADDED // (width * products.itemsize))
        if self._dtype == matrix_VK.dtype:
            self._whole_VK = torch.empty_like(matrix_VK)
            self._tiles = [self._whole_VK]
        else:
            size = TILE_ON_CPU if matrix_VK.device.type == "cpu" else TILE_ON_GPU
            height = max(1, size // (width * precise.itemsize))
            self._tiles = [torch.empty_like(t, dtype=precise) for t in matrix_VK.split(height)]
        self._is_empty = True

    def add(self, slope_CV: torch.Tensor, x_CK: torch.Tensor) -> None:
        beta = 0 if self._is_empty else 1
        if self._dtype == x_CK.dtype and self._whole_VK is not None:
            scaled_product_(self._whole_VK, slope_CV.t(), x_CK, self._scale, beta)
        elif x_CK.device.type == "cuda" and x_CK.itemsize == 2:
            # PyTorch multiplies 16-bit matrices into an fp32 sum on GPUs only.
            stop = 0
            for tile_RK in self._tiles:
                start, stop = stop, stop + len(tile_RK)
                scaled_product_(tile_RK, slope_CV[:, start:stop].t(), x_CK, self._scale, beta)
        else:
            self._add_by_tiles(slope_CV, x_CK)
        self._is_empty = False

    def _add_by_tiles(self, slope_CV: torch.Tensor, x_CK: torch.Tensor) -> None:
        made_RK = x_CK.new_empty(min(self._each, slope_CV.shape[1]), x_CK.shape[1])
        start = 0
        for rows_RK in (rows for tile in self._tiles for rows in tile.split(self._each)):
            stop = start + len(rows_RK)
            part_out = made_RK[: len(rows_RK)]
            part_RK = scaled_product_(part_out, slope_CV[:, start:stop].t(), x_CK, self._scale)
            if self._is_empty:
                rows_RK.copy_(part_RK)
            else:
                rows_RK.add_(part_RK)
            start = stop

    def take(self) -> torch.Tensor:
        """The sum, in the matrix's dtype. Call it once."""
        if self._is_empty:
            return torch.zeros_like(self._matrix_VK)
        if self._whole_VK is not None:
            return self._whole_VK
        rounded_VK = torch.empty_like(self._matrix_VK)
        stop = len(rounded_VK)
        while self._tiles:
            tile_RK = self._tiles.pop()
            rounded_VK[stop - len(tile_RK) : stop] = tile_RK
            stop -= len(tile_RK)
        return rounded_VK


def scale_(gradient: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Multiply `gradient` in place, and return it. `by` is a scalar, and is not rounded first."""
    precise = torch.promote_types(gradient.dtype, torch.float32)
    # With a dimension: scalars are cast to the dtype of what they multiply.
    by_1 = by.to(precise).reshape(1)
    if gradient.device.type != "cpu":
        return torch.mul(gradient, by_1, out=gradient)
    # As where backward starts at the loss: a pass over the memory of a head's gradient less.
    if by_1.item() == 1:
        return gradient
    block_rows = max(1, SCALED // max(1, gradient[:1].numel() * precise.itemsize))
    for rows in gradient.split(block_rows):
        torch.mul(rows, by_1, out=rows)
    return gradient
