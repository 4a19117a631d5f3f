"""Rank padding: LoRA adapters of a smaller rank in tensors of a larger rank.

A's rank is its second to last dimension, B's its last. The rest of either is zero: the product is
the same, and the gradients of padding are products with the other factor's zeros, so they are zero
too and no optimizer moves them. Files contain the smaller adapter only.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from penstock.adapters.init import initial_lora
from penstock.adapters.names import LoraParamName, parse_lora_name
from penstock.engine.checkpoint.dcp_io import Boxes, ShardView
from penstock.engine.checkpoint.train_state import MODEL, OPTIMIZER


def padded_lora_init(name: str, full_shape: Sequence[int], rank: int, seed: int) -> torch.Tensor:
    """The initial value of this factor with `rank`, padded to this shape; fp32 on the CPU."""
    factor = parse_lora_name(name)
    assert factor is not None, f"{name} is no part of an adapter"
    shape = list(full_shape)
    shape[rank_dim(factor, len(shape))] = rank
    return padded(name, initial_lora(name, shape, seed), full_shape)


def padded(name: str, tensor: torch.Tensor, full_shape: Sequence[int]) -> torch.Tensor:
    """A factor of a smaller rank, padded to this shape."""
    factor = parse_lora_name(name)
    assert factor is not None, f"{name} is no part of an adapter"
    dim = rank_dim(factor, len(full_shape))
    padded_tensor = torch.zeros(*full_shape, dtype=tensor.dtype)
    padded_tensor.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return padded_tensor


def rank_dim(factor: LoraParamName, dims: int) -> int:
    """The dimension of a factor's tensor that is the rank."""
    return dims - 2 if factor.side == "lora_A" else dims - 1


def trim_lora_rank(rank: int, boxes: Boxes) -> Boxes:
    """Trim the boxes of LoRA factors, and of their optimizer states, to a smaller rank. They are
    views."""
    trimmed: dict[str, list[ShardView]] = {}
    for name, parts in boxes.items():
        is_state = name.startswith(OPTIMIZER)
        tensor = name.removeprefix(OPTIMIZER).rpartition(".")[0] if is_state else name
        factor = parse_lora_name(tensor.removeprefix(MODEL))
        for box in parts:
            shape = list(box.full_shape)
            # Per-tensor scalars are not trimmed.
            if factor and len(shape) > 1:
                dim = rank_dim(factor, len(shape))
                size, shape[dim] = min(rank - box.offsets[dim], box.data.shape[dim]), rank
                if size <= 0:
                    continue
                data = box.data.narrow(dim, 0, size)
                box = replace(box, full_shape=tuple(shape), data=data)
            trimmed.setdefault(name, []).append(box)
    return trimmed
