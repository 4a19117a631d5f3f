"""Shared memory of a GPU: what a kernel's tiles, times its pipeline stages, must fit into."""

from functools import cache

import torch

UNLIMITED = 2**30


@cache
def shared_memory_per_block(device: torch.device) -> int:
    """Bytes that one thread block may use, opting in; without limit where it is no GPU."""
    if device.type != "cuda":
        return UNLIMITED
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)
