"""Rows in groups, and two codes in a byte. ..., K columns, G groups of a row."""

import torch
import torch.nn.functional as F


def split_groups(weight_K: torch.Tensor, group: int) -> torch.Tensor:
    """[..., K] as float32 [..., G, group]; the last group is filled with zeros."""
    missing = -weight_K.shape[-1] % group
    numbers = weight_K.float()
    if missing:
        numbers = F.pad(numbers, (0, missing))
    return numbers.unflatten(-1, (-1, group))


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes below 16, [..., G, group], as uint8 [..., G * group / 2]: the first in the low bits."""
    flat = codes.to(torch.uint8).flatten(-2)
    return flat[..., 0::2] | flat[..., 1::2] << 4


def unpack(packed: torch.Tensor, levels: tuple[float, ...]) -> torch.Tensor:
    """The level that each code stands for, float32 [..., 2 * bytes]."""
    table = torch.tensor(levels, device=packed.device)
    # A byte looks up two levels at once.
    pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], dim=-1)
    return F.embedding(packed.int(), pairs).flatten(-2)
