"""Which layers of a model bear adapters, by the names that were written for them."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from torch import nn

from penstock.adapters.lora_experts import expert_layers
from penstock.adapters.matching import HEAD, means
from penstock.adapters.names import EACH, EMBEDDING
from penstock.core.errors import ConfigError
from penstock.models.decoder import Decoder
from penstock.models.layers.experts import Experts
from penstock.models.layers.router import Router
from penstock.models.weights import FUSED


def layers_of(model: Decoder) -> dict[str, str]:
    """What may bear an adapter by the names in a checkpoint, and the native modules that are them.

    Those of all of a layer's experts are one, and bear the name that the module would have.
    """
    found: dict[str, str] = {}
    for native, module in model.named_modules():
        if isinstance(module, nn.Linear):
            found |= dict.fromkeys(layers_in(model, native), native)
        elif isinstance(module, Experts):
            found |= expert_layers(model, native, module)
        elif isinstance(module, nn.Embedding):
            found[native] = native
    return found


def layers_in(model: Decoder, native: str) -> dict[str, int]:
    """A checkpoint's linear layers that the native module is, and their output features."""
    parent, _, last = native.rpartition(".")
    if last == FUSED:
        return {f"{parent}.{part}": rows for part, rows in model.config.qkv_parts.items()}
    module = model.get_submodule(native)
    assert isinstance(module, (nn.Linear, nn.Embedding, Router))
    return {native: module.weight.shape[0]}


def is_of_experts(name: str) -> bool:
    """Whether this layer, or native module, is of experts."""
    return name.rpartition(".")[0].endswith((".experts", f".{EACH}"))


def chosen_layers(whole: Decoder, targets: Iterable[str]) -> list[str]:
    """The layers that a target names, by their names in a checkpoint, in the model's order.

    A target is taken as `matching.means` says, of a layer's name in a checkpoint or in the model.

    Raises:
        ConfigError: a target that names none, or a head or an embedding that are tied.
    """
    layers = layers_of(whole)
    chosen: set[str] = set()
    faults = []
    for target in targets:
        named = {hf for hf, native in layers.items() if means(target, hf) or means(target, native)}
        if not named:
            faults.append(_fault(target, layers, _routers(whole)))
        chosen |= named
    if faults or not chosen:
        faults = faults or ["lora.lora_target_modules is empty, so nothing would be trained"]
        last = sorted({hf.rpartition(".")[2] for hf in layers})
        raise ConfigError("\n".join([*faults, f"Layers here: {', '.join(last)}."]))
    if whole.config.tie_word_embeddings and (tied := chosen & {HEAD, EMBEDDING}):
        one = sorted(tied)[0].rpartition(".")[2]
        raise ConfigError(
            f"lora.lora_target_modules names {one}, and embedding and head are one weight in this "
            "model (tie_word_embeddings): one of them adapted could not be merged.\n"
            f"  Leave {one} out."
        )
    return [hf for hf in layers if hf in chosen]


def _routers(model: Decoder) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Router)]


def _fault(target: str, layers: dict[str, str], routers: Sequence[str]) -> str:
    said = f"lora.lora_target_modules: {target!r}"
    if any(means(target, router) for router in routers):
        return f"{said} is a router, and a router bears no adapter; leave it out"
    every = re.sub(r"\bexperts\.\d+\.", f"{EACH}.", target)
    if every != target and any(means(every, hf) for hf in layers):
        return f"{said} names one expert, and all of a layer are adapted; write {every!r}"
    ends = {hf.split(".", cut)[-1] for hf in layers for cut in range(hf.count(".") + 1)}
    near = get_close_matches(target, sorted(ends), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{said} names no linear layer of this model{hint}"
