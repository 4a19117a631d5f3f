"""Putting low-rank factors onto a model's linear layers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import nn

from penstock.adapters.lora import LoraLinear, fill
from penstock.core.errors import ConfigError
from penstock.models.decoder import Decoder
from penstock.models.family import LINEAR_PARTS
from penstock.models.weights import FUSED


@dataclass(frozen=True)
class LoraSpec:
    """What is adapted, and how strongly."""

    rank: int
    alpha: float
    targets: Sequence[str] | None = None
    """Names of linear layers in a checkpoint, whole or their ends (`q_proj`, `mlp.up_proj`); None
    for the family's own."""
    seed: int = 0

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied by."""
        return self.alpha / self.rank


def inject(
    model: Decoder, spec: LoraSpec, *, default_targets: Sequence[str] = LINEAR_PARTS
) -> tuple[str, ...]:
    """Adapt the targeted layers in place and freeze all else; return their names in a checkpoint.

    A decoder that is a part of itself is adapted as the whole one would be, so a target may name
    what is in another part. Factors of a model that has memory are filled with their start. On the
    meta device they stay unfilled, for `lora.fill` or `lora.initial_lora` once there is memory.

    Raises:
        ConfigError: a rank below 1, a target that names no linear layer, or a tied head.
    """
    if spec.rank < 1:
        raise ConfigError(f"lora.lora_rank is {spec.rank}. Give a rank of 1 or more.")
    targets = default_targets if spec.targets is None else spec.targets
    with torch.device("meta"):
        whole = Decoder(model.config, merge_qkv=model.merge_qkv)
    chosen = _chosen(_layers(whole), targets)
    if model.config.tie_word_embeddings and "lm_head" in chosen:
        raise ConfigError(
            "lora.lora_target_modules names lm_head, whose weight is the embedding's own in this "
            "model (tie_word_embeddings); an adapted head could not be merged. Leave lm_head out."
        )
    model.requires_grad_(False)
    here = _layers(model)
    for native in dict.fromkeys(here[hf] for hf in chosen if hf in here):
        parts = _layers_in(model, native)
        adapted = [hf.rpartition(".")[2] for hf in parts if hf in chosen]
        widths = {hf.rpartition(".")[2]: width for hf, width in parts.items()}
        linear = model.get_submodule(native)
        assert isinstance(linear, nn.Linear)
        adapter = LoraLinear(
            linear, parts=widths, adapted=adapted, rank=spec.rank, alpha=spec.alpha
        )
        model.set_submodule(native, adapter)
    if not any(parameter.is_meta for parameter in model.parameters()):
        fill(model, spec.seed)
    return tuple(chosen)


def _layers(model: Decoder) -> dict[str, str]:
    """Linear layers by their names in a checkpoint, and the native modules that are them."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return {hf: native for native in linears for hf in _layers_in(model, native)}


def _layers_in(model: Decoder, native: str) -> dict[str, int]:
    """A checkpoint's linear layers that the native module is, and their output features."""
    parent, _, last = native.rpartition(".")
    if last == FUSED:
        return {f"{parent}.{part}": rows for part, rows in model.config.qkv_parts.items()}
    return {native: model.get_submodule(native).get_parameter("weight").shape[0]}


def _chosen(layers: dict[str, str], targets: Iterable[str]) -> list[str]:
    """The layers that a target names, in the model's order."""
    chosen: set[str] = set()
    faults = []
    for target in targets:
        named = {
            hf for hf, native in layers.items() if _names(target, hf) or _names(target, native)
        }
        if not named:
            faults.append(_fault(target, layers))
        chosen |= named
    if faults or not chosen:
        faults = faults or ["lora.lora_target_modules is empty, so nothing would be trained"]
        last = sorted({hf.rpartition(".")[2] for hf in layers})
        raise ConfigError("\n".join([*faults, f"Linear layers here: {', '.join(last)}."]))
    return [hf for hf in layers if hf in chosen]


def _names(target: str, module: str) -> bool:
    return module == target or module.endswith(f".{target}")


def _fault(target: str, layers: dict[str, str]) -> str:
    ends = {hf.split(".", cut)[-1] for hf in layers for cut in range(hf.count(".") + 1)}
    near = get_close_matches(target, sorted(ends), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"lora.lora_target_modules: {target!r} names no linear layer of this model{hint}"
