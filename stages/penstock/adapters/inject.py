"""Injects LoRA into a model's layers and MoE experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from penstock.adapters.dora import Normed
from penstock.adapters.init import init_adapters
from penstock.adapters.lora import LoraLinear
from penstock.adapters.lora_embedding import LoraEmbedding
from penstock.adapters.lora_experts import ExpertSharing, adapt_experts
from penstock.adapters.lora_stacked import StackedAdapter
from penstock.adapters.names import is_expert_layer
from penstock.adapters.peft_format import Bias
from penstock.adapters.scaling import Scaling, lora_scaling
from penstock.adapters.targetable_layers import (
    checkpoint_layers,
    existing_targets,
    select_layers,
    targetable_layers,
    weight_map,
)
from penstock.adapters.validate_options import require_options
from penstock.core.errors import ConfigError
from penstock.models.automodel.causal_lm import AutoCausalLM
from penstock.models.causal_lm import CausalLM
from penstock.models.decoder import Decoder
from penstock.models.family import LINEAR_PARTS
from penstock.models.layers.dropout import Dropout, RowDropout
from penstock.models.layers.experts import Matrix
from penstock.models.layers.moe import MoE
from penstock.models.vision.tower import VisionTower


@dataclass(frozen=True)
class LoraSpec:
    """The LoRA configuration."""

    rank: int
    alpha: float
    targets: Sequence[str] | None = None
    """See `targets.select_layers`; None: the family's default targets."""
    seed: int = 0
    dropout: float = 0.0
    experts: ExpertSharing = "each"
    scaling: Scaling = "rank"
    normed: Normed = "plain"
    bias: Bias = "none"
    skip_missing: bool = False
    """Whether targets may name no layer of the model."""

    @property
    def scale(self) -> float:
        return lora_scaling(self.rank, self.alpha, self.scaling)


def inject(
    model: CausalLM,
    spec: LoraSpec,
    *,
    default_targets: Sequence[str] = LINEAR_PARTS,
    vision: VisionTower | None = None,
) -> tuple[str, ...]:
    """Add LoRA to the targeted layers in place, freeze the rest, and return the layers' checkpoint
    names.

    A pipeline stage gets the same adapters as the whole model would, so a target may name layers of
    another stage; `vision` is the vision part of the whole. If no parameter is on the meta device,
    the adapters are initialized. Otherwise they stay uninitialized until `init.init_adapters` or
    `init.initial_lora` is called.

    Raises:
        ConfigError: a rank below 1, a target that matches no layer or one that cannot be adapted,
            or an option that experts do not support.
    """
    if spec.rank < 1:
        raise ConfigError(f"lora.lora_rank is {spec.rank}. Give a rank of 1 or more.")
    root = whole_model(model, vision)
    targets = existing_targets(root, default_targets) if spec.targets is None else spec.targets
    chosen = select_layers(root, targets, skip_missing=spec.skip_missing)
    require_options(
        chosen,
        weight_map(root),
        dropout=spec.dropout,
        normed=spec.normed,
        experts=spec.experts,
        bias=spec.bias,
    )
    # Before everything is frozen: biases that are frozen already stay so.
    named = model.named_parameters()
    biases = [p for name, p in named if p.requires_grad and name.endswith(".bias")]
    model.requires_grad_(False)
    layers = targetable_layers(model)
    # A fused projection is one module of several of the checkpoint's layers.
    natives = list(dict.fromkeys(layers[hf] for hf in chosen if hf in layers))
    # A list: adapters become modules in the loop.
    for name, mixture in [*model.named_modules()]:
        if not isinstance(mixture, MoE):
            continue
        matrices: list[Matrix] = [
            matrix for matrix in mixture.experts.matrices if f"{name}.experts.{matrix}" in natives
        ]
        if matrices:
            adapt_experts(
                mixture,
                matrices,
                rank=spec.rank,
                scale=spec.scale,
                form=spec.experts,
                dropout=RowDropout(spec.dropout, f"{name}.experts") if spec.dropout else None,
            )
    if isinstance(model, AutoCausalLM):
        _adapt_stacked(model, natives, spec)
    for native in natives:
        if not is_expert_layer(native):
            model.set_submodule(native, _wrap_with_lora(model, native, chosen, spec))
    if spec.bias == "lora_only":
        adapted = [module for module in model.modules() if isinstance(module, LoraLinear)]
        biases = [module.bias for module in adapted if module.bias is not None]
    for bias in () if spec.bias == "none" else biases:
        bias.requires_grad_(True)
    if not any(parameter.is_meta for parameter in model.parameters()):
        init_adapters(model, spec.seed)
    return tuple(chosen)


def _adapt_stacked(model: AutoCausalLM, natives: Sequence[str], spec: LoraSpec) -> None:
    matrices: dict[str, list[Matrix]] = {}
    for native in natives:
        if native in model.config.outline.stacked:
            module, _, matrix = native.rpartition(".")
            matrices.setdefault(module, []).append(cast(Matrix, matrix))
    for module, matrices_of_module in matrices.items():
        StackedAdapter(
            model.get_submodule(module),
            matrices_of_module,
            rank=spec.rank,
            scale=spec.scale,
            dropout=RowDropout(spec.dropout, module) if spec.dropout else None,
        )


def whole_model(model: CausalLM, vision: VisionTower | None = None) -> CausalLM:
    """The model of which this one may be a pipeline stage, on the meta device."""
    if not isinstance(model, Decoder):
        return model
    with torch.device("meta"):
        return Decoder(model.config, merge_qkv=model.merge_qkv, vision=vision)


def _wrap_with_lora(
    model: CausalLM, native: str, chosen: Sequence[str], spec: LoraSpec
) -> nn.Module:
    base = model.get_submodule(native)
    if isinstance(base, nn.Embedding):
        return LoraEmbedding(base, rank=spec.rank, scale=spec.scale, normed=spec.normed)
    assert isinstance(base, nn.Linear)
    parts = checkpoint_layers(model, native)
    adapted = {hf.rpartition(".")[2]: hf for hf in parts if hf in chosen}
    return LoraLinear(
        base,
        parts={hf.rpartition(".")[2]: width for hf, width in parts.items()},
        adapted=list(adapted),
        rank=spec.rank,
        scale=spec.scale,
        dropout={part: Dropout(spec.dropout, hf) for part, hf in adapted.items()},
        normed=spec.normed,
    )
