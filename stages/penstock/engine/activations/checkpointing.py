"""Activation checkpointing: which modules recompute their activations in the backward pass."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.config.schema.parallelism import SPLIT_BACKWARD
from penstock.config.schema.train import TrainConfig
from penstock.core.errors import ConfigError
from penstock.engine.activations.checkpoint_moe import checkpoint_expert_gates
from penstock.engine.activations.recompute_once import checkpoint_once
from penstock.models.causal_lm import CausalLM
from penstock.models.decoder import Decoder
from penstock.models.layers.block import CALL_HOOKS, Block
from penstock.models.layers.call_hook import CallHook
from penstock.models.layers.dispatch_memo import remember_dispatch
from penstock.models.layers.dropout import preserve_dropout_rng
from penstock.models.layers.indexer import defer_losses
from penstock.models.layers.moe import MoE
from penstock.models.layers.router_observer import preserve_modalities, preserve_observer

Kind = Literal["plain", "reentrant", "once"]
"""PyTorch's two implementations, and one for backward passes that are split (zero bubble)."""

CORE_ATTENTION = "core_attn"
"""Core attention without its projections: softmax(q @ k.T) @ v, which is recomputed from q, k and v
(Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models").
"""

VISION = "vision"
"""The layers of a vision tower."""

MoERecompute = Literal["whole", "gates"]
"""What is recomputed of an MoE layer: everything, which dispatches tokens a second time, or only
the gated activation inside experts (`train.moe_checkpoint_method`).
"""


def checkpoint_kind(train: TrainConfig) -> Kind:
    """The implementation for these settings."""
    if train.pipeline_parallel_size > 1 and train.pipeline_parallel_schedule in SPLIT_BACKWARD:
        return "once"
    return "reentrant" if train.enable_reentrant else "plain"


def apply_activation_checkpointing(
    model: CausalLM,
    modules: Sequence[str] | None,
    kind: Kind,
    *,
    moe_recompute: MoERecompute = "whole",
) -> None:
    """Register recomputation of whole layers, or of the named modules in each layer; of a vision
    tower of its layers, unless the names lack `vision`.

    If only the `gates` of MoE layers are recomputed, such a layer is never recomputed as a whole:
    `None` then means both its parts. Hooks registered before run inside the recomputation, so a
    second time in the backward pass, with the same dropout masks.
    """
    recompute = partial(_with_recomputation, IMPLEMENTATIONS[kind])
    if modules is None or VISION in modules:
        _recompute_tower(model)
    layers = model.blocks
    moe_layers: dict[nn.Module, MoE] = {}
    if moe_recompute == "gates" and isinstance(model, Decoder):
        networks = ((layer, layer.mlp) for layer in layers if isinstance(layer, Block))
        moe_layers = {layer: mlp for layer, mlp in networks if isinstance(mlp, MoE)}
    if modules is None:
        run_layer = model.run_layer

        def recompute_unless_moe(module: Any, *args: Any) -> Any:
            is_moe = module in moe_layers
            return run_layer(module, *args) if is_moe else recompute(run_layer, module, *args)

        model.run_layer = recompute_unless_moe
    for name in CALL_HOOKS if modules is None else [name for name in modules if name != VISION]:
        if name == CORE_ATTENTION:
            for layer in layers:
                assert isinstance(layer, Block)
                if attention := layer.token_mixer:
                    attention.run_core = partial(recompute, attention.run_core)
            continue
        if name not in CALL_HOOKS:
            raise ConfigError(
                f"train.recompute_modules names {name}; a layer has "
                f"{', '.join((*CALL_HOOKS, CORE_ATTENTION, VISION))}."
            )
        # Without names, layers without experts are recomputed as a whole by `run_layer`.
        for layer in moe_layers if modules is None else layers:
            if name == "mlp" and layer in moe_layers:
                moe = moe_layers[layer]
                moe.experts.run = checkpoint_expert_gates
                # Shared experts do not communicate: they are recomputed as a whole.
                moe.run_shared = partial(recompute, moe.run_shared)
            else:
                hook = CALL_HOOKS[name]
                setattr(layer, hook, partial(recompute, getattr(layer, hook)))


def _recompute_tower(model: CausalLM) -> None:
    def recompute(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # A vision tower has no dropout.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    for block in model.vision.blocks if isinstance(model, Decoder) and model.vision else ():
        # Of the function, so that FSDP's hooks around the module run outside.
        block.forward = partial(recompute, block.forward)


def _with_recomputation(
    form: Callable[..., Any], run: CallHook, module: nn.Module, x: torch.Tensor, *args: Any
) -> Any:
    if not torch.is_grad_enabled():
        # Nothing will be recomputed; PyTorch's implementations have overhead even then.
        return run(module, x, *args)
    # The backward pass of a micro-batch may run while another one's dropout RNG and router observer
    # are active, or none.
    run = preserve_modalities(preserve_observer(preserve_dropout_rng(run)))
    return form(remember_dispatch(run), module, x, *args)


def _plain(run: CallHook, module: nn.Module, x: torch.Tensor, *args: Any) -> Any:
    # Dropout does not use torch's generators, whose saved state would cost a copy per layer.
    run = defer_losses(run)
    return checkpoint(run, module, x, *args, use_reentrant=False, preserve_rng_state=False)


def _reentrant(run: CallHook, module: nn.Module, x: torch.Tensor, *args: Any) -> Any:
    if not x.requires_grad:
        # Reentrant checkpointing only works if an input requires a gradient, and below the first
        # adapter none does.
        x = x.detach().requires_grad_()
    # The first call runs without gradients, in which indexers compute no loss: none is deferred.
    return checkpoint(run, module, x, *args, use_reentrant=True, preserve_rng_state=False)


IMPLEMENTATIONS = {
    "plain": _plain,
    "reentrant": _reentrant,
    "once": lambda run, *args: checkpoint_once(defer_losses(run), *args),
}
