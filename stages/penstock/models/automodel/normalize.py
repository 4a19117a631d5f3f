"""Changes to a transformers model so that the engine can shard and adapt it: all tensors of a
checkpoint are parameters, with at least one dimension, and every linear layer is `nn.Linear`.

What it computes stays the same. Checkpoint files keep the original form
(`engine/hf/converted_weights.py`).
"""

from typing import Any

import torch
from torch import nn


def normalize(model: nn.Module) -> None:
    """Apply all changes to a model on the meta device, in place."""
    # Persistent buffers are loaded, sharded and saved as parameters without gradients.
    for name in persistent_buffers(model):
        module, leaf = _owner(model, name)
        value = module._buffers.pop(leaf)
        assert value is not None
        module.register_parameter(leaf, nn.Parameter(value.to("meta"), requires_grad=False))
    # FSDP2 shards rows, so a scalar is a vector of one element.
    for name in scalars(model):
        module, leaf = _owner(model, name)
        scalar = model.get_parameter(name)
        vector = nn.Parameter(scalar.detach().reshape(1), requires_grad=scalar.requires_grad)
        setattr(module, leaf, vector)
    for name in transposed_layers(model):
        old: Any = model.get_submodule(name)
        inputs, outputs = old.weight.shape
        layer = nn.Linear(inputs, outputs, device="meta", dtype=torch.float32)
        layer.bias = old.bias
        module, leaf = _owner(model, name)
        setattr(module, leaf, layer)


def persistent_buffers(model: nn.Module) -> list[str]:
    """The names of buffers that are part of checkpoints."""
    saved = model.state_dict(keep_vars=True)
    return [name for name, _ in model.named_buffers() if name in saved]


def scalars(model: nn.Module) -> list[str]:
    """The names of scalar parameters and persistent buffers."""
    saved = model.state_dict(keep_vars=True)
    return [name for name, tensor in saved.items() if not tensor.dim()]


def transposed_layers(model: nn.Module) -> list[str]:
    """The names of linear layers that store [in, out], as GPT-2's."""
    from transformers.pytorch_utils import Conv1D  # noqa: PLC0415

    return [name for name, module in model.named_modules() if isinstance(module, Conv1D)]


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    module, _, leaf = name.rpartition(".")
    return model.get_submodule(module), leaf
