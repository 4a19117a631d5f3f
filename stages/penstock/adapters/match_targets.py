"""Matches `lora_target_modules` to layers by names and shapes. No torch, because `penstock plan`
counts trainable parameters with it."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from penstock.adapters.names import EACH, EMBEDDING, is_of_experts
from penstock.core.errors import CapabilityError, ConfigError
from penstock.models.automodel.weight_map import AutoWeightMap
from penstock.models.decoder_config import DecoderConfig
from penstock.models.multimodal import STORED_MODEL, is_language, stored_name, text_name
from penstock.models.names import EMBEDDING_WEIGHT, IMAGE_EXPERTS, INDEXER
from penstock.models.vision.types import MODULES, VISION, is_vision
from penstock.models.weights import WeightMap

# Every linear layer except the head, as in PEFT.
ALL_LINEAR = "all-linear"

# Begins a target that is a regular expression, as a string of PEFT's `target_modules` is.
REGEX = "re:"

HEAD = "lm_head"
ROUTERS = "mlp.gate", f"mlp.{IMAGE_EXPERTS}.gate"


@dataclass(frozen=True)
class TargetLayer:
    """A linear layer of a checkpoint, or the same layer of every expert."""

    name: str
    """Name in the checkpoint; `*` stands for an expert's number."""
    native: str
    outputs: int
    inputs: int
    experts: int = 0
    """Number of experts that have it; 0: not an expert's layer."""
    of: str = ""
    """The native parameter that contains its rows."""
    names: frozenset[str] = frozenset()
    """All names by which targets select it; see `target_names`."""


def matches(target: str, layer: str) -> bool:
    """Whether `target` selects this layer: it is ALL_LINEAR, the layer's name, a suffix of the name
    that starts at a dot, a glob pattern (`*`, `?`, `[0-3]`) for either, or after REGEX a regular
    expression of the whole name. Layers of a vision part are selected only by targets that name a
    module of it, such as `visual.blocks.*.attn.qkv`."""
    if is_vision(layer) and not names_vision(target):
        return False
    # PEFT matches the names of single experts, of which one stands for all.
    if target.startswith(REGEX):
        return bool(re.fullmatch(target.removeprefix(REGEX), layer.replace("*", "0")))
    if target == ALL_LINEAR:
        return layer not in (HEAD, EMBEDDING)
    if layer == target or layer.endswith(f".{target}"):
        return True
    # Names of expert layers contain a `*` themselves, which a `*` in the pattern also matches.
    is_pattern = any(sign in target for sign in "*?[")
    return is_pattern and (fnmatchcase(layer, target) or fnmatchcase(layer, f"*.{target}"))


def names_vision(target: str) -> bool:
    """Whether a target names a module of a vision part."""
    return bool({*MODULES, VISION.rstrip(".")} & {*re.findall(r"\w+", target)})


def target_names(layer: str, native: str, names: WeightMap) -> frozenset[str]:
    """The names by which targets select a layer: its checkpoint name, its native name and, in a
    multimodal model, those in transformers' class and in files of older classes."""
    names_of_layer = {layer, native, names.module_name(layer)}
    if names.is_multimodal and is_language(f"{layer}."):
        names_of_layer.add(stored_name(text_name(layer), STORED_MODEL))
    return frozenset(names_of_layer)


def match_targets(targets: Iterable[str], layers: Iterable[TargetLayer]) -> list[TargetLayer]:
    """The layers that any of the targets selects, by any of their names."""
    targets = tuple(targets)
    return [
        layer
        for layer in layers
        if any(matches(target, name) for target in targets for name in layer.names)
    ]


def select_layer_names(
    targets: Iterable[str],
    layers: Mapping[str, Collection[str]],
    routers: Sequence[str],
    *,
    is_tied: bool,
    skip_missing: bool = False,
) -> tuple[set[str], list[str]]:
    """The checkpoint names of the layers that any target selects, and the targets that name none.
    `layers` maps checkpoint names to all names; `is_tied`: the embedding and the head share one
    weight.

    Raises:
        ConfigError: no target, or without `skip_missing` any, that names no layer; a target that
            names a router or a single expert, or a tied head or embedding.
    """
    chosen: set[str] = set()
    faults: list[str] = []
    missing: list[str] = []
    for target in targets:
        named = {hf for hf, names in layers.items() if any(matches(target, n) for n in names)}
        if not named and (fault := _explain_unadaptable(target, layers, routers)):
            faults.append(fault)
        elif not named:
            missing.append(target)
        chosen |= named
    for target in missing if not (skip_missing and chosen) else ():
        ends = {hf.split(".", cut)[-1] for hf in layers for cut in range(hf.count(".") + 1)}
        near = get_close_matches(target, sorted(ends), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        faults.append(
            f"lora.lora_target_modules: {target!r} names no linear layer of this model{hint}"
        )
    if faults or not chosen:
        faults = faults or ["lora.lora_target_modules is empty, so nothing would be trained"]
        last = sorted({hf.rpartition(".")[2] for hf in layers})
        raise ConfigError("\n".join([*faults, f"  Layers here: {', '.join(last)}."]))
    if is_tied and (tied := chosen & {HEAD, EMBEDDING}):
        example = sorted(tied)[0].rpartition(".")[2]
        raise ConfigError(
            f"lora.lora_target_modules names {example}, and embedding and head are one weight in "
            "this model (tie_word_embeddings): one of them adapted could not be merged.\n"
            f"  Leave {example} out."
        )
    return chosen, missing


def require_layers(
    targets: Iterable[str], names: WeightMap, *, skip_missing: bool = False
) -> list[str]:
    """The targets that name no layer of this model. Raises ConfigError as `select_layer_names`."""
    layers = {layer.name: layer.names for layer in linear_layers(names)}
    modules = {native.rpartition(".")[0] for native in names.native_names()}
    routers = sorted(module for module in modules if module.endswith(ROUTERS))
    is_tied = names.config.tie_word_embeddings
    _, missing = select_layer_names(
        targets, layers, routers, is_tied=is_tied, skip_missing=skip_missing
    )
    return missing


def require_adaptable(config: DecoderConfig) -> None:
    """Raise CapabilityError for a model that does not support adapters."""
    if not config.is_adaptable:
        raise CapabilityError(
            "lora.enable_lora is true, and layers of this model cannot have adapters: its "
            "checkpoints call the backbone otherwise.\n  Write lora.enable_lora: false."
        )


def linear_layers(names: WeightMap) -> Iterator[TargetLayer]:
    """The layers that can have an adapter, in the model's order: all except routers and indexers,
    whose selection has no gradient."""
    for layer in _linear_layers(names):
        yield replace(layer, names=target_names(layer.name, layer.native, names))


def _linear_layers(names: WeightMap) -> Iterator[TargetLayer]:
    if isinstance(names, AutoWeightMap):
        for name, (outputs, inputs) in names.config.outline.linear.items():
            yield TargetLayer(name, name, outputs, inputs, of=f"{name}.weight")
        for native, is_transposed in names.config.outline.stacked.items():
            experts, *sides = names.native_shape(native)
            outputs, inputs = reversed(sides) if is_transposed else sides
            yield TargetLayer(stacked_layer(native), native, outputs, inputs, experts, native)
        return
    shapes = names.hf_shapes()
    for native in names.native_names():
        module, _, leaf = native.rpartition(".")
        if is_of_experts(native):
            experts = names.config.experts
            yield from _expert_layers(names, native) if experts and experts.adaptable else ()
        elif leaf == "weight" and not module.endswith(ROUTERS) and f".{INDEXER}." not in module:
            for tensor in names.hf_names(native):
                is_renamed = native == EMBEDDING_WEIGHT != tensor
                if len(shapes[tensor]) == 2 and not is_renamed:
                    outputs, inputs = shapes[tensor]
                    name = EMBEDDING if native == EMBEDDING_WEIGHT else tensor[: -len(".weight")]
                    yield TargetLayer(name, module, outputs, inputs, of=native)


def stacked_layer(native: str) -> str:
    """The name of the layers that a tensor of stacked experts holds, with `*` for an expert's
    number."""
    module, _, matrix = native.rpartition(".")
    return f"{module}.*.{matrix}"


def _expert_layers(names: WeightMap, native: str) -> Iterator[TargetLayer]:
    config = names.config
    experts = config.experts
    assert experts is not None
    module, _, matrix = native.rpartition(".")
    number = module.split(".")[2]
    stored = f"{config.names.backbone}.layers.{number}.{experts.names.block}.{EACH}"
    width, inner = experts.latent_size or config.hidden_size, experts.intermediate_size
    called = {"gate_proj": experts.names.gate, "up_proj": experts.names.up}
    parts: dict[str, tuple[str, int, int]] = {}
    if matrix == "down_proj":
        last = matrix if experts.is_stacked else experts.names.down
        parts[matrix] = (last, width, inner)
    elif matrix == "gate_up_proj" and experts.is_stacked:
        parts[matrix] = (matrix, 2 * inner, width)
    elif matrix == "up_proj":
        parts[matrix] = (called[matrix], inner, width)
    elif matrix == "gate_up_proj":
        parts = {part: (name, inner, width) for part, name in called.items()}
    for part, (name, outputs, inputs) in parts.items():
        yield TargetLayer(
            f"{stored}.{name}", f"{module}.{part}", outputs, inputs, experts.num_experts, native
        )


def _explain_unadaptable(target: str, layers: Iterable[str], routers: Sequence[str]) -> str | None:
    prefix = f"lora.lora_target_modules: {target!r}"
    if any(matches(target, router) for router in routers):
        return f"{prefix} is a router, which cannot have an adapter; leave it out"
    every = re.sub(r"\bexperts\.\d+\.", f"{EACH}.", target)
    if every != target and any(matches(every, hf) for hf in layers):
        return f"{prefix} names one expert, and all of a layer are adapted; write {every!r}"
    return None
