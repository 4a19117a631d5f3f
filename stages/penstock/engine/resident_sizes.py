"""What a model of a client will take on disk, before any of it is written."""

import math
from typing import NamedTuple

from penstock.engine.checkpoint_state import Trained
from penstock.engine.ranks import Ranks

BESIDE = 1 << 20
"""Bytes of all files beside the numbers, at most: tables of contents, configs."""
TOKENIZER = 64 << 20
"""Of a tokenizer's files, at most."""
STATES = {"adamw": 8, "anyprecisionadamw": 10, "muon": 8, "sgd": 4}
"""Bytes that an optimizer keeps for each number, at most: two moments in fp32, and in bfloat16 what
rounding takes from weights."""


class Sizes(NamedTuple):
    """In bytes."""

    state: int
    """Weights and what the optimizer keeps once it has stepped."""
    export: int
    """Weights alone, in fp32; and as they are kept, which lie beside these while it is written."""


def sizes_of(trained: Trained, ranks: Ranks, exported: int | None = None) -> Sizes:
    """Of what `trained` saves of weights, whose `exported` numbers are in an export; None: as many
    as are saved. Called by all ranks."""
    parts = [
        (name, math.prod(boxes[0].whole) * boxes[0].data.element_size(), math.prod(boxes[0].whole))
        for name, boxes in trained.boxes().items()
    ]
    # Several ranks hold some of a tensor: each counts once.
    everywhere = {
        name: (size, numbers) for here in ranks.gather(parts) for name, size, numbers in here
    }
    weights = sum(size for size, _ in everywhere.values())
    numbers = sum(count for _, count in everywhere.values())
    states = STATES[type(trained.optimizer).__name__.lower()] * numbers
    beside = weights + BESIDE + TOKENIZER
    return Sizes(
        weights + states + BESIDE, 4 * (numbers if exported is None else exported) + beside
    )
