"""Finds a model's layers that `lora_target_modules` selects."""

from collections.abc import Iterable

from torch import nn

from penstock.adapters.lora_experts import expert_layers
from penstock.adapters.match_targets import select_layer_names, stacked_layer
from penstock.adapters.names import EACH, EMBEDDING
from penstock.models.automodel.causal_lm import AutoCausalLM
from penstock.models.causal_lm import CausalLM
from penstock.models.layers.experts import Experts
from penstock.models.layers.router import Router
from penstock.models.weights import QKV_PROJ


def targetable_layers(model: CausalLM) -> dict[str, str]:
    """Maps the checkpoint names of all layers that can have an adapter to native module names.

    The same layer of all experts of a MoE layer is one entry; its native name is the module's name
    plus the matrix.
    """
    found: dict[str, str] = {}
    for native, module in model.named_modules():
        if isinstance(module, nn.Linear):
            found |= dict.fromkeys(checkpoint_layers(model, native), native)
        elif isinstance(module, Experts):
            found |= expert_layers(model, native, module)
        elif isinstance(module, nn.Embedding) and native == EMBEDDING:
            found[native] = native
    if isinstance(model, AutoCausalLM):
        found |= {stacked_layer(native): native for native in model.config.outline.stacked}
    return found


def checkpoint_layers(model: CausalLM, native: str) -> dict[str, int]:
    """The checkpoint's linear layers that the native module contains, and their output features."""
    parent, _, last = native.rpartition(".")
    if last == QKV_PROJ and model.merge_qkv and not model.config.fused_qkv:
        parts = model.config.of_layer(int(parent.split(".")[2])).qkv_features
        return {f"{parent}.{part}": rows for part, rows in parts.items()}
    module = model.get_submodule(native)
    assert isinstance(module, (nn.Linear, nn.Embedding, Router))
    return {native: module.weight.shape[0]}


def is_expert_layer(name: str) -> bool:
    """Whether this layer, or native module, belongs to experts."""
    return name.rpartition(".")[0].endswith((".experts", f".{EACH}"))


def select_layers(whole: CausalLM, targets: Iterable[str]) -> list[str]:
    """The checkpoint names of the layers that any target selects, in the model's order.

    Targets are matched by `match_targets.matches` against checkpoint names and native names.

    Raises:
        ConfigError: a target that selects nothing, or a tied head or embedding.
    """
    layers = targetable_layers(whole)
    routers = [name for name, module in whole.named_modules() if isinstance(module, Router)]
    chosen = select_layer_names(targets, layers, routers, is_tied=whole.config.tie_word_embeddings)
    return [hf for hf in layers if hf in chosen]
