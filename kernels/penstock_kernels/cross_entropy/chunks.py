"""How many tokens' logits are there at a time.

With few, a head's matrix is read from memory too often; with many, logits fill it.
"""

import torch

ON_CPU, FEWEST_ON_CPU, MOST_ON_CPU = 16 << 20, 192, 1024
ON_GPU, FEWEST_ON_GPU = 768 << 20, 256
"""Bytes of logits, and tokens whatever they come to."""


def tokens_at_once(width: int, dtype: torch.dtype, device: torch.device) -> int:
    """For logits of so many entries of the vocabulary."""
    row = max(1, width * dtype.itemsize)
    if device.type == "cpu":
        return min(max(FEWEST_ON_CPU, ON_CPU // row), MOST_ON_CPU)
    return max(FEWEST_ON_GPU, ON_GPU // row // FEWEST_ON_GPU * FEWEST_ON_GPU)
