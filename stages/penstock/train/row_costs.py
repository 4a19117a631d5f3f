"""Compute costs of packed rows, by which the ranks that share a step are balanced."""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.engine.build import BuiltModel
from penstock.rows.batches import Integers, assign_micro_batches
from penstock.rows.reader import PackedRows


class RowCosts(NamedTuple):
    """Costs of rows, in query-key pairs."""

    text: Integers
    """Of their tokens. The rows of a step depend on these alone, whatever is computed of images."""
    total: Integers
    """With their images, whose work depends on the vision part and the layout."""


def row_costs(built: BuiltModel, rows: PackedRows) -> RowCosts:
    """The costs of all rows."""
    text = built.pairs_per_token * rows.lengths() + rows.squares()
    images = built.image_cost
    return RowCosts(text, text if images is None else text + images.row_costs(rows))


def local_micro_batches(
    built: BuiltModel, rows: Sequence[int], costs: Sequence[int], *, size: int, count: int
) -> list[list[int]]:
    """The rows of each of the `count` micro-batches of at most `size` rows that this rank's replica
    computes, of `rows` with these costs."""
    replicas = built.dims.num_replicas
    groups = assign_micro_batches(rows, costs, num_replicas=replicas, size=size, count=count)
    return groups[built.engine.model.mesh.index("replicate", "shard")]
