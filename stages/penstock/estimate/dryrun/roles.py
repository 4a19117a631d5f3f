"""Which ranks stand for all: ranks of one pipeline stage do the same work on shards of one size."""

from typing import Literal

from penstock.engine.distributed.device_mesh import AXES
from penstock.engine.distributed.parallel_dims import ParallelDims

RankChoice = Literal["roles", "all"]

MAX_RANKS = 64
"""Most ranks that `all` runs."""


def select_ranks(dims: ParallelDims, choice: RankChoice) -> list[int]:
    """The ranks to run: the first of each pipeline stage, whose shards are the largest, or all."""
    if choice == "all":
        return list(range(dims.world_size))
    assert AXES[0] == "pipeline"
    ranks_per_stage = dims.world_size // dims.pipeline
    return [stage * ranks_per_stage for stage in range(dims.pipeline)]
