"""Statistics for scales that span more than a group."""

import torch
import torch.nn.functional as F

from penstock_kernels.quant.formats import Format

# Minimum maximum for scales: zeros are divided by this.
SMALLEST = 1e-12

E4M3_MOST = 448.0
E2M1_MOST = 6.0
INT8_MOST = 127.0
# Symmetric: -8 is never used.
INT4_MOST = 7.0


def divide_float32(numbers: torch.Tensor, by: float) -> torch.Tensor:
    """Correctly rounded division in float32, on every device.

    PyTorch multiplies by a reciprocal where one operand of a division is a plain number: of
    numbers over tensors everywhere, of tensors over numbers on GPUs.
    """
    return numbers / numbers.new_full((), by)


def largest(weight_NK: torch.Tensor, format: Format, first_row: int = 0) -> torch.Tensor | None:
    """The absolute maxima that `quantize` takes, of [..., N, K]; None if it takes none.

    For a matrix [..., 1, 1] with `nvfp4`, for a row [..., N, 1] with `int8` and `fp8`, and with
    `block_fp8` for the tile of each row's group, [..., N, G]. With shards, take the maximum over
    all ranks before quantizing; then the codes equal those of the full tensor. Where a shard's rows
    begin within a tile, `first_row` is their index in the full tensor. NaN counts as infinite, so
    that maxima over ranks keep it.
    """
    if format.scales == "e4m3":
        return _largest(weight_NK, (-2, -1))
    if format.group is None:
        return _largest(weight_NK, (-1,))
    if format.tile_rows > 1:
        return _of_tiles(weight_NK, format.tile_rows, format.group, first_row % format.tile_rows)
    return None


def row_maxima(
    weight_NK: torch.Tensor, format: Format, row_max: torch.Tensor | None
) -> torch.Tensor | None:
    """`row_max`, or `largest` of the weight, for each of its rows: [..., N, 1] or [..., N, G].

    Raises:
        ValueError: `row_max` has another shape, or the format takes none.
    """
    maxima = largest(weight_NK, format) if row_max is None else row_max
    if maxima is None:
        return None
    *rows, columns = weight_NK.shape
    if format.tile_rows > 1:
        rows.append(format.num_groups(columns))
    elif format.group is None or format.scales == "e4m3":
        rows.append(1)
    else:
        raise ValueError(f"{format.name} takes no largest magnitudes: each group has its own")
    expected, has = tuple(reversed(rows)), tuple(reversed(maxima.shape))
    fits = has[:1] == expected[:1] and len(has) <= len(expected)
    if not fits or any(
        size not in (1, expected_size) for size, expected_size in zip(has, expected, strict=False)
    ):
        raise ValueError(
            f"{format.name} of {tuple(weight_NK.shape)} takes largest magnitudes {tuple(rows)}, "
            f"and these are {tuple(maxima.shape)}; cut what `largest` gives of the whole alike"
        )
    return maxima.float().expand(rows)


def _largest(weight: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    # Not abs and amax, which would write as many numbers as they read.
    maxima = torch.linalg.vector_norm(weight, float("inf"), dim=dims, keepdim=True).float()
    return torch.where(maxima.isnan(), float("inf"), maxima)


def _of_tiles(weight_NK: torch.Tensor, tall: int, wide: int, above: int) -> torch.Tensor:
    """Maxima of the tiles of rows' groups; the first tile lacks its first `above` rows."""
    N, K = weight_NK.shape[-2:]
    missing = 0, -K % wide, above, -(above + N) % tall
    if any(missing):
        weight_NK = F.pad(weight_NK, missing)
    tiles = weight_NK.unflatten(-1, (-1, wide)).unflatten(-3, (-1, tall))
    of_tile = _largest(tiles, (-3, -1))[..., 0, :, 0]
    return of_tile.repeat_interleave(tall, -2).narrow(-2, above, N)
