"""Activation checkpointing: which parts of the model compute their activations twice."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.config.schema.parallelism import SPLIT_BACKWARD
from penstock.config.schema.train import TrainConfig
from penstock.core.errors import ConfigError
from penstock.engine.activations.checkpoint_moe import checkpoint_moe_act
from penstock.engine.activations.recompute_once import checkpoint_once
from penstock.models.decoder import Decoder
from penstock.models.layers.attention import SelfAttention
from penstock.models.layers.block import SOCKETS
from penstock.models.layers.call_hook import CallHook
from penstock.models.layers.dropout import preserve_dropout_rng
from penstock.models.layers.moe import MoE
from penstock.models.layers.router_observer import preserve_observer

Kind = Literal["plain", "reentrant", "once"]
"""PyTorch's two forms, and the one for a backward pass that is made of several."""

CORE = "core_attn"
"""Attention without its projections: softmax(q @ k.T) @ v, which is recomputed from q, k and v
(Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models")."""

Mixtures = Literal["whole", "gates"]
"""What is recomputed of a mixture of experts: all, which sends tokens to their experts a second
time, or only what experts compute between their products (`train.moe_checkpoint_method`)."""


def checkpoint_kind(train: TrainConfig) -> Kind:
    """The form that suits the settings."""
    if train.pipeline_parallel_size > 1 and train.pipeline_parallel_schedule in SPLIT_BACKWARD:
        return "once"
    return "reentrant" if train.enable_reentrant else "plain"


def checkpoint_moe_settings(train: TrainConfig) -> Mixtures:
    """What the settings say of mixtures."""
    return "gates" if train.moe_checkpoint_method == "moe_act" else "whole"


def apply_activation_checkpointing(
    model: Decoder, modules: Sequence[str] | None, kind: Kind, *, mixtures: Mixtures = "whole"
) -> None:
    """Plug recomputation into the model: whole layers, or only the named parts of each layer.

    Where only the `gates` of mixtures are recomputed, a layer that has one is never recomputed as a
    whole: `None` then means both its parts. What was plugged there before is called within, and so
    a second time in the backward pass, where it drops what it dropped the first time.
    """
    again = partial(_again, FORMS[kind])
    layers = list(model.model.layers.values())
    apart: dict[nn.Module, MoE] = {}
    if mixtures == "gates":
        networks = ((layer, layer.get_submodule("mlp")) for layer in layers)
        apart = {layer: mlp for layer, mlp in networks if isinstance(mlp, MoE)}
    if modules is None:
        model.run_layer = partial(_unless, apart, again, model.run_layer)
    for name in SOCKETS if modules is None else modules:
        if name == CORE:
            for layer in layers:
                attention = layer.get_submodule("self_attn")
                assert isinstance(attention, SelfAttention)
                attention.run_core = partial(again, attention.run_core)
            continue
        if name not in SOCKETS:
            raise ConfigError(
                f"train.recompute_modules names {name}; a layer has {', '.join((*SOCKETS, CORE))}."
            )
        for layer in apart if modules is None else layers:
            if name == "mlp" and layer in apart:
                checkpoint_moe_act(apart[layer], again)
            else:
                setattr(layer, SOCKETS[name], partial(again, getattr(layer, SOCKETS[name])))


def _unless(
    apart: Collection[nn.Module],
    again: Callable[..., Any],
    run: CallHook,
    module: nn.Module,
    *args: Any,
) -> Any:
    return run(module, *args) if module in apart else again(run, module, *args)


def _again(
    form: Callable[..., Any], run: CallHook, module: nn.Module, x: torch.Tensor, *rest: Any
) -> Any:
    if not torch.is_grad_enabled():
        # Nothing will be computed again; PyTorch's own forms take their time to find that out.
        return run(module, x, *rest)
    # The backward pass of a micro-batch may come when another one's noise is drawn from, or none,
    # and another one's watch looks on.
    return form(preserve_observer(preserve_dropout_rng(run)), module, x, *rest)


def _plain(run: CallHook, module: nn.Module, x: torch.Tensor, *rest: Any) -> Any:
    # Draws do not come from torch's generators, whose saved state would cost a copy per layer.
    return checkpoint(run, module, x, *rest, use_reentrant=False, preserve_rng_state=False)


def _reentrant(run: CallHook, module: nn.Module, x: torch.Tensor, *rest: Any) -> Any:
    if not x.requires_grad:
        # This kind only notices gradients that are wanted of its inputs, and below the first
        # adapter nothing wants any.
        x = x.detach().requires_grad_()
    return checkpoint(run, module, x, *rest, use_reentrant=True, preserve_rng_state=False)


FORMS = {"plain": _plain, "reentrant": _reentrant, "once": checkpoint_once}
