"""LoRA scaling."""

import math
from typing import Literal

Scaling = Literal["rank", "root"]
"""The divisor of alpha: the rank, or its square root (rsLoRA, Kalajdzievski 2023), which keeps
adapters of high rank from training too slowly."""


def lora_scaling(rank: int, alpha: float, scaling: Scaling) -> float:
    """The factor of the product B A."""
    return alpha / (rank if scaling == "rank" else math.sqrt(rank))
