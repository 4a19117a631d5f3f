"""One base model that several models are trained on in turn, by clients: how it is assembled, and
what weights it may be filled with.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.fsdp import FSDPModule

from penstock.adapters.match_targets import HEAD
from penstock.adapters.names import parse_factor
from penstock.config.schema.run import RunConfig
from penstock.core.errors import CapabilityError
from penstock.engine.build import (
    BuiltModel,
    assemble,
    load,
    lora_target_layers,
    saves_adapters_only,
)
from penstock.engine.distributed.param_shards import LocalParam, local
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.hf.base_model import BaseModelWeights
from penstock.engine.model_source import quantization_args
from penstock.engine.quantization.select_layers import Formats
from penstock.models.family import Family
from penstock.models.registry import get_family
from penstock.models.weights import WeightMap

Sharing = Literal["adapters", "alone"]
"""Whether models share the base, each with adapters of its own, or one at a time has it all."""

UNMET = {
    "use_dora": "magnitudes start at norms of the base, which every model would have to measure",
    "use_rslora": "what a model asks for is alpha, which counts by the rank here",
    "lora_dropout": "a client's loss is to be what it computes from log-probabilities",
    "enable_aqn": "a client's loss is to be what it computes from log-probabilities",
    "lora_bias": "what models have of their own is adapters alone",
}
"""Settings of adapters under which clients cannot be served, and why."""


@dataclass(frozen=True)
class SharedBase:
    """An assembled model, without one that is trained on it."""

    run: RunConfig
    hf_config: Mapping[str, Any]
    weights: Path | None
    """A folder of safetensors; None: drawn from the seed."""
    built: BuiltModel
    ranks: ProcessInfo

    @property
    def sharing(self) -> Sharing:
        """Adapters that are merged into the base change it, so that nobody can share it."""
        return "adapters" if saves_adapters_only(self.run.lora) else "alone"

    @property
    def family(self) -> Family:
        """The architecture."""
        return get_family(dict(self.hf_config))

    @property
    def names(self) -> WeightMap:
        """Of the tensors in a checkpoint, where nothing is fused."""
        return self.family.weight_map(self.built.config)

    @property
    def adapted(self) -> list[str]:
        """The layers of the whole model that bear adapters, by their names in a checkpoint."""
        if not self.run.lora.enable_lora:
            return []
        return lora_target_layers(self.run, self.family, self.built.config)

    @property
    def has_tied_head(self) -> bool:
        """Whether the head is the embedding itself, which bears no adapter."""
        return self.built.config.tie_word_embeddings

    @property
    def trainable(self) -> list[LocalParam]:
        """What gradients are computed of on this rank, in one order."""
        return self.built.engine.layout.trainable

    @property
    def factors(self) -> list[LocalParam]:
        """The adapters' tensors on this rank."""
        return [one for one in self.trainable if parse_factor(one.name)]

    @property
    def base(self) -> BaseModelWeights:
        """The weights that it was assembled with, by the names that they have in a checkpoint."""
        return BaseModelWeights(
            self.names,
            quantization_args(self.run),
            self.hf_config,
            self.family.roles,
            self.weights,
        )

    @property
    def formats(self) -> Formats:
        """Of the matrices that the base has in fewer bits."""
        return self.base.formats

    @torch.no_grad()
    def refill(self, folder: Path | None = None) -> None:
        """Let every parameter be what it was when nothing was trained; with a `folder` of a whole
        model take the weights from there. Called by all ranks."""
        run, family = self.run, self.family
        names = family.weight_map(self.built.config, merge_qkv=run.model.merge_qkv)
        weights = folder or self.weights
        base = replace(self.base, names=names, folder=weights)
        load(self.built.engine.layout.held, base, weights, run, self.ranks)
        self.settle()

    def settle(self) -> None:
        """To be called when parameters were written to: what was gathered of them is forgotten."""
        for part in self.built.engine.layout.parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    @torch.no_grad()
    def copied(
        self, held: Sequence[LocalParam], device: torch.device | None = None
    ) -> list[torch.Tensor]:
        """Copies of this rank's parts of parameters, where they are or on a device."""
        return [local(one.parameter.detach()).to(device, copy=True) for one in held]

    @torch.no_grad()
    def put(self, held: Sequence[LocalParam], values: Sequence[torch.Tensor]) -> None:
        """Let this rank's parts of parameters be these."""
        for one, value in zip(held, values, strict=True):
            local(one.parameter.detach()).copy_(value)
        self.settle()


def build_shared_base(
    run: RunConfig,
    hf_config: dict[str, Any],
    weights: Path | None,
    ranks: ProcessInfo,
    notify: Callable[[str], None],
) -> SharedBase:
    """Assemble the model that `run` asks for, for clients to train.

    Adapters are on the head as well, unless other layers are named or the head is the embedding;
    and no loss is added to those of clients.

    Raises:
        CapabilityError: for settings that clients cannot be served under.
    """
    lora = run.lora
    for name, why in UNMET.items():
        if lora.enable_lora and lora.asks_for(name):
            raise CapabilityError(
                f"lora.{name} is written, and models of several clients cannot have it: {why}.\n"
                f"  Leave {name} out."
            )
    if lora.enable_lora and lora.lora_target_modules is None:
        family = get_family(hf_config)
        is_tied = family.read(hf_config).tie_word_embeddings
        targets = [*family.lora_targets, *([] if is_tied else [HEAD])]
        lora = lora.model_copy(update={"lora_target_modules": targets})
    train = run.train.model_copy(update={"moe_aux_loss_coef": 0.0})
    run = run.model_copy(update={"lora": lora, "train": train})
    built = assemble(run, hf_config, weights, ranks, notify)
    return SharedBase(run, hf_config, weights, built, ranks)
