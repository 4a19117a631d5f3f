"""Activation checkpointing: which parts of the model compute their activations twice."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.core.errors import ConfigError
from penstock.models.decoder import Decoder

SOCKETS = {"self_attn": "run_attn", "mlp": "run_mlp"}


def recompute(model: Decoder, modules: Sequence[str] | None, reentrant: bool) -> None:
    """Plug recomputation into the model: whole layers, or only the named parts of each layer."""
    again = partial(_checkpointed, use_reentrant=reentrant)
    if modules is None:
        model.run_layer = again
        return
    for name in modules:
        if name not in SOCKETS:
            raise ConfigError(
                f"train.recompute_modules names {name}; a layer has {', '.join(SOCKETS)}."
            )
        for layer in model.model.layers:
            setattr(layer, SOCKETS[name], again)


def _checkpointed(module: nn.Module, *args: Any, use_reentrant: bool) -> Any:
    if use_reentrant and torch.is_grad_enabled() and not args[0].requires_grad:
        # The reentrant kind only notices gradients that are wanted of its inputs, and below the
        # first adapter nothing wants any.
        args = (args[0].detach().requires_grad_(), *args[1:])
    # Nothing in a layer draws random numbers yet the saved state costs a copy per layer.
    return checkpoint(module, *args, use_reentrant=use_reentrant, preserve_rng_state=False)
