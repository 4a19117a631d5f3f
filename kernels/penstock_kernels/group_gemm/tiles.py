"""Tile sizes of group GEMM, by shape and device.

A rule selects them, and lists the candidates for autotuning (`tuning`).
"""

from typing import NamedTuple

import torch

from penstock_kernels.op import INTERPRETED
from penstock_kernels.tuning import shared_memory_per_block

# Tiles of rows walked together, column by column, so that both operands stay in the L2 cache.
BAND = 8


class Tiles(NamedTuple):
    """Tile sizes and launch settings of a program."""

    rows: int
    columns: int
    depth: int
    """Contracted dimension of a tile."""
    warps: int
    stages: int
    """Pipeline stages, each with its own part of shared memory."""

    def num_bytes(self, itemsize: int) -> int:
        """Shared memory."""
        return (self.rows + self.columns) * self.depth * self.stages * itemsize


# The interpreter's cost is the number of programs. Small tiles give small shapes many edges.
_INTERPRETED = Tiles(rows=16, columns=16, depth=16, warps=4, stages=2)

INTERPRETED_PROGRAMS = 5
"""Of the interpreter, so that programs walk several tiles there too."""

RESIDENT_WARPS = 16
"""Of the programs of a multiprocessor, whose registers are shared by all."""

# fp32 is exact rather than fast: it does not use tensor cores.
_FP32 = Tiles(rows=64, columns=64, depth=32, warps=4, stages=2)

_WIDE = Tiles(rows=128, columns=256, depth=64, warps=8, stages=4)
# On Ampere 4 warps would hold more sums than they have registers.
_SQUARE = Tiles(rows=128, columns=128, depth=64, warps=8, stages=3)
_LEAN = Tiles(rows=128, columns=128, depth=32, warps=4, stages=3)

# Columns of tiles for groups with so few rows, on average, that larger tiles would be padding.
_SHORT = {16: 128, 32: 128, 64: 128}


def by_rows(like: torch.Tensor, num_rows: int, num_groups: int) -> Tiles:
    """Tiles for num_groups products that share so many rows."""
    largest = of_groups(like)
    average = num_rows / num_groups
    for rows, columns in _SHORT.items():
        if average <= rows < largest.rows:
            return largest._replace(rows=rows, columns=columns, warps=4)
    return largest


def programs(tiles: Tiles, like: torch.Tensor) -> int:
    """How many programs of such tiles run at once."""
    if like.device.type != "cuda":
        return INTERPRETED_PROGRAMS
    multiprocessors = torch.cuda.get_device_properties(like.device).multi_processor_count
    resident = shared_memory_per_block(like.device) // tiles.num_bytes(like.element_size())
    return multiprocessors * min(max(resident, 1), RESIDENT_WARPS // tiles.warps)


def candidates(first: Tiles, like: torch.Tensor) -> list[Tiles]:
    """Candidates for autotuning: the rule's choice, and others where tensor cores are used."""
    if INTERPRETED or like.dtype == torch.float32:
        return [first]
    return [first, *others(first, like.element_size(), shared_memory_per_block(like.device))]


def others(first: Tiles, itemsize: int, shared_memory: int) -> list[Tiles]:
    """Candidates beside `first` that fit: with as many rows, so that the same instructions add in
    the same order.
    """
    if first.rows < _SQUARE.rows:
        candidates = [first._replace(columns=64), first._replace(stages=3)]
    else:
        candidates = [_WIDE, _WIDE._replace(stages=3), _SQUARE, _SQUARE._replace(warps=4, stages=4)]
    return [
        tiles
        for tiles in candidates
        if tiles != first and tiles.num_bytes(itemsize) < shared_memory
    ]


def of_groups(x_TK: torch.Tensor) -> Tiles:
    """Tiles for products that contract rows, whose output has the size of the weights."""
    if INTERPRETED:
        return _INTERPRETED
    if x_TK.dtype == torch.float32:
        return _FP32
    if torch.version.hip is not None:
        return _LEAN
    return largest(x_TK.element_size(), shared_memory_per_block(x_TK.device))


def largest(itemsize: int, shared_memory: int) -> Tiles:
    """The largest tiles that fit."""
    fitting = (
        candidate for candidate in (_WIDE, _SQUARE) if candidate.num_bytes(itemsize) < shared_memory
    )
    return next(fitting, _LEAN)
