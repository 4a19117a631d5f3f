"""How much a low-rank product counts."""

import math
from typing import Literal

Scaling = Literal["rank", "root"]
"""What alpha is divided by: the rank, or its root (Kalajdzievski 2023, "rsLoRA"), which keeps
adapters of a large rank from learning too slowly."""


def lora_scaling(rank: int, alpha: float, scaling: Scaling) -> float:
    """What the product B A is multiplied by."""
    return alpha / (rank if scaling == "rank" else math.sqrt(rank))
