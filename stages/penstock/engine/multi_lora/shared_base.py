"""Shared base model: one base on which clients train several models in turn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.fsdp import FSDPModule

from penstock.adapters.match_targets import HEAD, names_vision
from penstock.adapters.names import parse_lora_name
from penstock.config.schema.run import RunConfig
from penstock.core.errors import CapabilityError
from penstock.engine.build import (
    BuiltModel,
    assemble,
    load_params,
    lora_target_layers,
    saves_adapters_only,
)
from penstock.engine.distributed.param_shards import LocalParam, local
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.hf.base_model import BaseModelWeights
from penstock.engine.model_source import quantization_args
from penstock.engine.quantization.select_layers import Formats
from penstock.engine.vision.build import left_to_base
from penstock.models.automodel.family import AutoFamily
from penstock.models.family import Family
from penstock.models.registry import get_family
from penstock.models.vision.types import VISION_TYPES, VisionConfig, read_vision
from penstock.models.weights import WeightMap

Sharing = Literal["adapters", "alone"]
"""Whether models share the base with their own adapters, or one at a time owns all weights."""

# Adapter settings that the server does not support, and why.
UNSUPPORTED = {
    "use_dora": "magnitudes start at norms of the base, which every model would have to measure",
    "use_rslora": "what a model asks for is alpha, which counts by the rank here",
    "lora_dropout": "a client's loss is to be what it computes from log-probabilities",
    "enable_aqn": "a client's loss is to be what it computes from log-probabilities",
    "lora_bias": "what models have of their own is adapters alone",
}


@dataclass(frozen=True)
class SharedBase:
    """A built base model, without a client's model."""

    run: RunConfig
    hf_config: Mapping[str, Any]
    weights: Path | None
    """A folder of safetensors; None: initialized from the seed."""
    built: BuiltModel
    ranks: ProcessInfo

    @property
    def sharing(self) -> Sharing:
        """Merging adapters (ReLoRA) modifies the base, so it cannot be shared."""
        return "adapters" if saves_adapters_only(self.run.lora) else "alone"

    @property
    def family(self) -> Family:
        run = self.run
        return get_family(dict(self.hf_config), run.model.backend, adapters=run.lora.enable_lora)

    @property
    def vision(self) -> VisionConfig | None:
        return read_vision(self.hf_config) if self.family.multimodal else None

    @property
    def names(self) -> WeightMap:
        """The names of checkpoint tensors, without fused projections. The vision part is frozen and
        has none."""
        return self.family.weight_map(self.built.config)

    @property
    def adapted(self) -> list[str]:
        """The layers with adapters in the full model, by checkpoint name."""
        if not self.run.lora.enable_lora:
            return []
        return lora_target_layers(self.run, self.family, self.built.config)

    @property
    def has_tied_head(self) -> bool:
        """Whether the head is the tied embedding, which has no adapter."""
        return self.built.config.tie_word_embeddings

    @property
    def params(self) -> list[LocalParam]:
        """The parameters on this rank, except those of the frozen vision part."""
        params = self.built.engine.model.params
        frozen = left_to_base(params)
        return [param for param in params if id(param.parameter) not in frozen]

    @property
    def trainable(self) -> list[LocalParam]:
        """The trainable parameters on this rank, in a fixed order."""
        return self.built.engine.model.trainable

    @property
    def factors(self) -> list[LocalParam]:
        return [param for param in self.trainable if parse_lora_name(param.name)]

    @property
    def base(self) -> BaseModelWeights:
        quantizing, roles = quantization_args(self.run), self.family.roles
        return BaseModelWeights(self.names, quantizing, self.hf_config, roles, self.weights)

    @property
    def formats(self) -> Formats:
        return self.base.formats

    @torch.no_grad()
    def reset_to_base(self, folder: Path | None = None) -> None:
        """Reload the initial weights of every parameter, or those of a full model in `folder`.
        Collective."""
        run, family = self.run, self.family
        names = family.weight_map(self.built.config, merge_qkv=run.model.merge_qkv)
        weights = folder or self.weights
        base = replace(self.base, names=names, folder=weights)
        load_params(self.params, base, weights, run, self.ranks)
        self.reshard()

    def reshard(self) -> None:
        """Reshard FSDP modules after parameters were modified: gathered copies are stale."""
        for part in self.built.engine.model.parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    @torch.no_grad()
    def copy_params(
        self, params: Sequence[LocalParam], device: torch.device | None = None
    ) -> list[torch.Tensor]:
        """Copies of this rank's shards of parameters, on their device or another."""
        # copy=True: on its own device `to` would return the shard, which the next model overwrites.
        return [local(param.parameter.detach()).to(device, copy=True) for param in params]

    @torch.no_grad()
    def load_params(self, params: Sequence[LocalParam], values: Sequence[torch.Tensor]) -> None:
        for param, value in zip(params, values, strict=True):
            local(param.parameter.detach()).copy_(value)
        self.reshard()


def build_shared_base(
    run: RunConfig,
    hf_config: dict[str, Any],
    weights: Path | None,
    ranks: ProcessInfo,
    notify: Callable[[str], None],
) -> SharedBase:
    """Build the model that `run` describes, for clients to train.

    The LM head has an adapter as well, unless target modules are named or the head is tied; and no
    auxiliary loss is added to the clients' losses. A model that takes images natively is built with
    its vision part, which is frozen.

    Raises:
        CapabilityError: settings that the server does not support.
    """
    lora = run.lora
    for name, why in UNSUPPORTED.items():
        if lora.enable_lora and lora.is_non_default(name):
            raise CapabilityError(
                f"lora.{name} is written, and models of several clients cannot have it: {why}.\n"
                f"  Leave {name} out."
            )
    family = get_family(hf_config, run.model.backend, adapters=run.lora.enable_lora)
    if family.multimodal and family.model_type not in VISION_TYPES:
        raise CapabilityError(
            f"the model is a {family.model_type}, and the server has text models and those that"
            f" take images: {', '.join(VISION_TYPES)}.\n"
            "  Train its language model with penstock run, or name another model."
        )
    targets = lora.lora_target_modules or []
    targets = [targets] if isinstance(targets, str) else list(targets)
    if lora.enable_lora and (of_vision := [*filter(names_vision, targets)]):
        raise CapabilityError(
            f"lora_target_modules names {of_vision[0]}, of the vision part, which is frozen here.\n"
            "  Name layers of the language model."
        )
    if lora.enable_lora and lora.lora_target_modules is None:
        is_tied = family.read(hf_config).tie_word_embeddings
        head = family.outline.head if isinstance(family, AutoFamily) else HEAD
        targets = [*family.lora_targets, *([] if is_tied else [head])]
        lora = lora.model_copy(update={"lora_target_modules": targets})
    # Not None, which means the model's own coefficient.
    train = run.train.model_copy(update={"moe_aux_loss_coef": 0.0})
    run = run.model_copy(update={"lora": lora, "train": train})
    built = assemble(run, hf_config, weights, ranks, notify, images=bool(family.multimodal))
    return SharedBase(run, hf_config, weights, built, ranks)
