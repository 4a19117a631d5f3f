"""Linear layers on CPUs whose weights are packed once, for many products of few rows.

A product of few rows takes as long as reading its matrix; MKL, which PyTorch calls for fp32, copies
the matrix into an order of its own in every call. Here the copy is made once, in oneDNN's blocked
layout, and kept. The operators are those of TorchInductor's frozen graphs: PyTorch has no public
ones.
"""

import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

ROWS = 16
"""Rows that the layout is chosen for. For 2 to 100 of them it took at most MKL's time on a CPU with
AVX-512, and a third of it at best."""

LARGE = 1 << 21
"""Elements of a matrix from which on it is faster for a single row too."""

_packed = WeakTensorKeyDictionary()
"""By weight [N, K]: its copy, in the dtype of the products."""


def is_packable(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether products with this weight in `dtype` may use a packed copy."""
    # Exactly: DTensors and matrices of other formats are subclasses, or no tensors.
    return (
        type(weight) in (torch.Tensor, nn.Parameter)
        and weight.device.type == "cpu"
        and weight.ndim == 2
        and weight.is_floating_point()
        and platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
        and (
            dtype == torch.float32
            or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
        )
    )


@contextmanager
def packed_weights(layers: Iterable[nn.Linear], dtype: torch.dtype) -> Iterator[None]:
    """A context in which these layers compute with packed copies of their weights in `dtype`, if
    they are packable. No gradients; the weights must not change meanwhile."""
    replaced = [layer for layer in layers if is_packable(layer.weight, dtype)]
    try:
        for layer in replaced:
            copy = layer.weight.detach().to(dtype)
            _packed[layer.weight] = torch.ops.mkldnn._reorder_linear_weight(copy, ROWS)
            # Layers with a forward of their own call `packed_linear`.
            if type(layer).forward is nn.Linear.forward:
                layer.__dict__["forward"] = partial(_forward, layer)
        yield
    finally:
        for layer in replaced:
            layer.__dict__.pop("forward", None)
        _packed.clear()


def is_packed(weight: torch.Tensor) -> bool:
    """Whether `packed_linear` has a packed copy of this weight."""
    return weight in _packed


def packed_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x W^T + b`, [..., N]: `torch.nn.functional.linear`, with the packed copy if there is one."""
    packed = _packed.get(weight) if _packed else None
    if packed is None:
        return nn.functional.linear(x, weight, bias)
    if x.numel() == x.shape[-1] and weight.numel() <= LARGE and packed.dtype == weight.dtype:
        # Of a single row MKL copies nothing, and takes less time to begin.
        return nn.functional.linear(x, weight, bias)
    bias = bias if bias is None else bias.to(packed.dtype)
    return torch.ops.mkldnn._linear_pointwise(x.to(packed.dtype), packed, bias, "none", [], "")


def _forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return packed_linear(x, layer.weight, layer.bias)
