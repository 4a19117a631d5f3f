"""Finds a model's layers that `lora_target_modules` selects."""

from collections.abc import Iterable

from torch import nn

from penstock.adapters.lora_experts import expert_layers
from penstock.adapters.match_targets import (
    matches,
    select_layer_names,
    stacked_layer,
    target_names,
)
from penstock.adapters.names import EMBEDDING
from penstock.models.automodel.causal_lm import AutoCausalLM
from penstock.models.automodel.weight_map import AutoWeightMap
from penstock.models.causal_lm import CausalLM
from penstock.models.decoder import Decoder
from penstock.models.layers.experts import Experts
from penstock.models.layers.router import Router
from penstock.models.names import EMBEDDING_WEIGHT
from penstock.models.weights import WeightMap


def targetable_layers(model: CausalLM) -> dict[str, str]:
    """Maps the checkpoint names of all layers that can have an adapter to native module names.

    The same layer of all experts of a MoE layer is one entry; its native name is the module's name
    plus the matrix.
    A `Router` is no `nn.Linear`: routers are left out, as by name in `match_targets.linear_layers`.
    """
    targets_by_layer: dict[str, str] = {}
    outline = model.config.outline if isinstance(model, AutoCausalLM) else None
    has_usual_name = model.config.names.embedding == EMBEDDING_WEIGHT
    for native, module in model.named_modules():
        if outline and outline.media and native not in outline.linear:
            continue  # of the vision part
        if isinstance(module, nn.Linear):
            targets_by_layer |= dict.fromkeys(checkpoint_layers(model, native), native)
        elif isinstance(module, Experts):
            targets_by_layer |= expert_layers(model, native, module)
        elif isinstance(module, nn.Embedding) and native == EMBEDDING and has_usual_name:
            targets_by_layer[native] = native
    if isinstance(model, AutoCausalLM):
        targets_by_layer |= {
            stacked_layer(native): native for native in model.config.outline.stacked
        }
    return targets_by_layer


def checkpoint_layers(model: CausalLM, native: str) -> dict[str, int]:
    """The checkpoint's linear layers that the native module contains, and their output features."""
    module = model.get_submodule(native)
    assert isinstance(module, (nn.Linear, nn.Embedding, Router))
    if not isinstance(model, Decoder) or native == EMBEDDING:
        return {native: module.weight.shape[0]}
    names = model.weight_map
    parts = [tensor.removesuffix(".weight") for tensor in names.hf_names(f"{native}.weight")]
    if len(parts) == 1:
        return {parts[0]: module.weight.shape[0]}
    return {part: names.hf_shapes()[f"{part}.weight"][0] for part in parts}


def existing_targets(model: CausalLM, targets: Iterable[str]) -> list[str]:
    """The family's default targets without those of layers that only other of its models have."""
    layers = targetable_layers(model)
    names = [name for hf_and_native in layers.items() for name in hf_and_native]
    return [target for target in targets if any(matches(target, name) for name in names)]


def weight_map(model: CausalLM) -> WeightMap:
    """The names of the model's tensors in checkpoints."""
    return model.weight_map if isinstance(model, Decoder) else AutoWeightMap(model.config)


def select_layers(
    model: CausalLM, targets: Iterable[str], *, skip_missing: bool = False
) -> list[str]:
    """The checkpoint names of the layers that any target selects, in the model's order. Targets are
    matched by `match_targets.matches` against checkpoint names and native names. Raises ConfigError
    as `match_targets.select_layer_names`."""
    layers = targetable_layers(model)
    routers = [name for name, module in model.named_modules() if isinstance(module, Router)]
    is_tied = model.config.tie_word_embeddings
    names = weight_map(model)
    called = {hf: target_names(hf, native, names) for hf, native in layers.items()}
    chosen, _ = select_layer_names(
        targets, called, routers, is_tied=is_tied, skip_missing=skip_missing
    )
    return [hf for hf in layers if hf in chosen]
