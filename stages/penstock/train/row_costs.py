"""Compute costs of packed rows, by which the ranks that share a step are balanced."""

from typing import NamedTuple

from penstock.engine.build import BuiltModel
from penstock.rows.batches import Integers
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
