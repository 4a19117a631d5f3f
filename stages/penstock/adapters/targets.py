"""Which layers of a model bear adapters, by the names that were written for them."""

from collections.abc import Iterable

from torch import nn

from penstock.adapters.lora_experts import expert_layers
from penstock.adapters.match_targets import chosen_names
from penstock.adapters.names import EACH
from penstock.models.decoder import Decoder
from penstock.models.layers.experts import Experts
from penstock.models.layers.router import Router
from penstock.models.weights import FUSED


def targetable_layers(model: Decoder) -> dict[str, str]:
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
    layers = targetable_layers(whole)
    routers = [name for name, module in whole.named_modules() if isinstance(module, Router)]
    chosen = chosen_names(targets, layers, routers, is_tied=whole.config.tie_word_embeddings)
    return [hf for hf in layers if hf in chosen]
