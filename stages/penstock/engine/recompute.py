"""Activation checkpointing: which parts of the model compute their activations twice."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.config.parallel import SPLIT_BACKWARD
from penstock.config.train import TrainConfig
from penstock.core.errors import ConfigError
from penstock.engine.recompute_once import run_again_once
from penstock.models.decoder import Decoder
from penstock.models.layers.block import SOCKETS, Run

Kind = Literal["plain", "reentrant", "once"]
"""PyTorch's two forms, and the one for a backward pass that is made of several."""


def kind_of(train: TrainConfig) -> Kind:
    """The form that suits the settings."""
    if train.pipeline_parallel_size > 1 and train.pipeline_parallel_schedule in SPLIT_BACKWARD:
        return "once"
    return "reentrant" if train.enable_reentrant else "plain"


def recompute(model: Decoder, modules: Sequence[str] | None, kind: Kind) -> None:
    """Plug recomputation into the model: whole layers, or only the named parts of each layer.

    What was plugged there before is called within, and so a second time in the backward pass.
    """
    again = FORMS[kind]
    if modules is None:
        model.run_layer = partial(again, model.run_layer)
        return
    for name in modules:
        if name not in SOCKETS:
            raise ConfigError(
                f"train.recompute_modules names {name}; a layer has {', '.join(SOCKETS)}."
            )
        for layer in model.model.layers.values():
            setattr(layer, SOCKETS[name], partial(again, getattr(layer, SOCKETS[name])))


def _plain(run: Run, module: nn.Module, x: torch.Tensor, *rest: Any) -> Any:
    # Nothing in a layer draws random numbers yet the saved state costs a copy per layer.
    return checkpoint(run, module, x, *rest, use_reentrant=False, preserve_rng_state=False)


def _reentrant(run: Run, module: nn.Module, x: torch.Tensor, *rest: Any) -> Any:
    if torch.is_grad_enabled() and not x.requires_grad:
        # This kind only notices gradients that are wanted of its inputs, and below the first
        # adapter nothing wants any.
        x = x.detach().requires_grad_()
    return checkpoint(run, module, x, *rest, use_reentrant=True, preserve_rng_state=False)


FORMS = {"plain": _plain, "reentrant": _reentrant, "once": run_again_once}
