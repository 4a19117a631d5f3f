"""Layers that are compiled (`train.enable_compile`): one program for all layers of a kind.

What is compiled is a layer's own computation, within whatever recomputes it, shards its weights or
is plugged into it. The number of tokens is left open, and the lengths of documents are data, so
other rows need no other program.
"""

import torch
from torch import nn

from penstock.engine.compilers import require_compiler
from penstock.models.decoder import Decoder
from penstock.models.layers.block import Block
from penstock.models.layers.feed_forward import FeedForward
from penstock.models.layers.run import direct


def compile_layers(model: Decoder, device: torch.device) -> None:
    """Compile what the layers of a model, or of a part of one, compute; in place.

    A block is one program if nothing is plugged between its parts. Otherwise attention and a
    feed-forward network are one each; mixtures of experts, whose rows are counted as they come, are
    left to their kernels. To be called when all else is plugged in.

    Raises:
        CapabilityError: nothing compiles for the device here.
    """
    require_compiler(device, "train.enable_compile is true", "Leave enable_compile out.")
    for layer in model.model.layers.values():
        assert isinstance(layer, Block)
        for module in _programs(layer):
            # Not the module's call, which runs the hooks of whoever shards it.
            module.forward = torch.compile(module.forward, dynamic=True)


def _programs(block: Block) -> list[nn.Module]:
    is_dense = isinstance(block.mlp, FeedForward)
    is_alone = block.run_attn is direct and block.run_mlp is direct
    drops = any(dropout.rate for dropout in (block.drop_attn, block.drop_mlp))
    if is_dense and is_alone and not drops:
        return [block]
    return [block.self_attn, *([block.mlp] if is_dense else [])]
