"""Classes of operators, and the bytes that they read and write."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from penstock.estimate.dryrun.achieved import OperatorClass

GROUPED_MATMULS = ("_grouped_mm", "_scaled_grouped_mm", "_by_rows", "_of_groups")
"""Grouped GEMM kernels, PyTorch's and ours."""

FLOAT8_MATMULS = ("_scaled_mm", "_multiply")

LOSS_CALL_SITES = ("kernels/cross_entropy", "kernels/logit_chunks", "losses/", "engine/losses/")

OVERWRITING = re.compile(r"(_foreach_)?(copy|zero|fill|normal|uniform|random|bernoulli)_")
"""Operators that do not read what they write in place."""

GATHERING = ("embedding", "index_select", "index", "gather")
"""Operators that read of their first tensor only what they return."""

EXITING_EARLY = ("_zero_rows",)
"""Triton kernels that write only where experts have no rows: here they have."""


def classify(name: str, computes: bool, phase: str, call_site: str) -> OperatorClass:
    """The class of a kernel; `computes`: whether it multiplies matrices."""
    if "attn" in name or "attention" in name:
        return "attention backward" if "backward" in name else "attention forward"
    if name in GROUPED_MATMULS:
        return "grouped products"
    if name in FLOAT8_MATMULS:
        return "float8 products"
    is_loss = call_site.startswith(LOSS_CALL_SITES)
    if computes:
        return "head" if is_loss else "products"
    if phase == "update":
        return "optimizer"
    return "loss" if is_loss else "elementwise"


def operator_traffic(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> tuple[int, list[torch.Tensor]]:
    """Bytes that an operator of ATen reads and writes, and all of its tensors.

    What is updated in place is read and written.
    """
    name = func._schema.name.partition("::")[2]
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    for argument, value in _arguments(func, args, kwargs):
        tensors = [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written:
            written += tensors
        if not is_written or not (argument.is_out or OVERWRITING.fullmatch(name)):
            read += tensors
    updated = {id(tensor) for tensor in written}
    results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and id(x) not in updated]
    written += results
    num_bytes = [_traffic(tensor) for tensor in read]
    if name in GATHERING and num_bytes:
        num_bytes[0] = min(num_bytes[0], sum(map(_traffic, results)))
    return sum(num_bytes) + sum(map(_traffic, written)), [*read, *written]


def triton_traffic(name: str, source: str, values: Mapping[str, Any]) -> int:
    """Bytes that a Triton kernel reads and writes: its tensors once, those it updates twice."""
    tensors = {key: x for key, x in values.items() if isinstance(x, torch.Tensor)}
    if name in EXITING_EARLY:
        return 0
    updated = _updated_pointers(source)
    return sum((1 + (key in updated)) * _traffic(x) for key, x in tensors.items())


@cache
def _updated_pointers(source: str) -> set[str]:
    """Arguments of a Triton kernel that it loads and stores."""
    loaded, stored = (
        set(re.findall(rf"\b(?:tl\.|_){verb}\(\s*(\w+_ptr)\b", source))
        for verb in ("load", "store")
    )
    return loaded & stored


def _arguments(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    for index, argument in enumerate(func._schema.arguments):
        if index < len(args):
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _traffic(tensor: torch.Tensor) -> int:
    """Bytes of a tensor that are moved; an expanded tensor is read once."""
    moved = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        moved *= size if stride else 1
    return moved
