"""The order of construction. This file is that order; read it top to bottom.

    meta -> adapters -> recomputation -> sharding -> storage -> weights -> replication -> optimizer

Nothing is allocated until it is known where it lies, so a model larger than one device assembles.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.adapters.inject import LoraSpec, inject
from penstock.adapters.lora import initial_lora
from penstock.adapters.names import factor_of
from penstock.config.run import RunConfig
from penstock.config.train import TrainConfig
from penstock.core.errors import CapabilityError
from penstock.engine.checkpoint import Trained
from penstock.engine.parallel.data import replicate, shard
from penstock.engine.parallel.degrees import Degrees, degrees_of
from penstock.engine.parallel.mesh import mesh_of
from penstock.engine.ranks import Ranks
from penstock.engine.recompute import recompute
from penstock.engine.step import Engine
from penstock.engine.weights import Read, SafetensorsFolder, fill
from penstock.models.cost import pairs_per_token
from penstock.models.decoder import Decoder
from penstock.models.family import Family
from penstock.models.initialise import initialise
from penstock.models.registry import family_of
from penstock.models.shape import DecoderConfig
from penstock.models.weights import WeightMap
from penstock.optim.build import OptimizerName, build_optimizer
from penstock_kernels.attention import attention

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Assembled:
    """A model ready to train."""

    engine: Engine
    trained: Trained
    degrees: Degrees
    layout: dict[str, Any]
    vocab_size: int
    pairs_per_token: int
    """What a token costs in pairs of tokens, for telling dear rows from cheap ones."""


def assemble(
    run: RunConfig,
    hf_config: dict[str, Any],
    weights: Path | None,
    ranks: Ranks,
    notify: Notify,
) -> Assembled:
    """Build the model that `run` asks for, laid out over `ranks`, with its weights and optimizer.

    `weights` is a folder of safetensors, or None for a random start from `train.seed`.
    """
    train = run.train
    degrees = degrees_of(train, ranks.world)
    family = family_of(hf_config)
    config = family.read(hf_config)
    names = family.weight_map(config, merge_qkv=run.model.merge_qkv)
    model = build_empty(run, family, config, ranks.device, notify)
    if train.enable_gradient_checkpointing:
        recompute(model, train.recompute_modules, train.enable_reentrant)
    sharded = train.data_parallel_mode == "fsdp2"
    if sharded:
        units = shard_units(model, run.model.basic_modules)
        shard(model, units, mesh_of(degrees, ranks.device.type), train)
    model.to_empty(device="cpu" if train.init_device == "cpu" else ranks.device)
    load(model, names, weights, run, ranks)
    model.to(ranks.device)
    wrapped: nn.Module = model
    if train.data_parallel_mode == "ddp":
        wrapped = replicate(model, ranks.device)
    optimizer = build_optimizer(
        model.named_parameters(),
        optimizer=optimizer_name(train),
        lr=train.lr,
        weight_decay=train.weight_decay,
        no_decay_modules=train.no_decay_modules,
        no_decay_params=train.no_decay_params,
    )
    casts_itself = sharded or not train.enable_mixed_precision
    engine = Engine(
        model=wrapped,
        optimizer=optimizer,
        ranks=ranks,
        autocast=None if casts_itself else torch.bfloat16,
        max_grad_norm=train.max_grad_norm,
    )
    return Assembled(
        engine=engine,
        trained=Trained(model, optimizer, only_trained=run.lora.enable_lora),
        degrees=degrees,
        layout={
            "mode": train.data_parallel_mode,
            "replicate": degrees.replicate,
            "shard": degrees.shard,
        },
        vocab_size=config.vocab_size,
        pairs_per_token=pairs_per_token(config),
    )


def build_empty(
    run: RunConfig,
    family: Family,
    config: DecoderConfig,
    device: torch.device,
    notify: Notify,
) -> Decoder:
    """The architecture with its adapters, on the meta device: shapes and no storage."""
    with torch.device("meta"):
        model = Decoder(
            config,
            merge_qkv=run.model.merge_qkv,
            attention=attention.backend(choose_attention(run, device, notify)),
        )
        if run.lora.enable_lora:
            inject(model, lora_spec(run, family))
    return model


def lora_spec(run: RunConfig, family: Family) -> LoraSpec:
    """What the `lora` section says, in the adapter's words."""
    lora = run.lora
    targets = tuple(lora.lora_target_modules or family.lora_targets)
    return LoraSpec(
        rank=lora.lora_rank, alpha=lora.lora_alpha, targets=targets, seed=run.train.seed
    )


def optimizer_name(train: TrainConfig) -> OptimizerName:
    """The optimizer that was written. Raises CapabilityError for one that is not there yet."""
    if train.optimizer in ("adamw", "sgd"):
        return train.optimizer
    raise CapabilityError(f"train.optimizer {train.optimizer} is not available yet; write adamw.")


def choose_attention(run: RunConfig, device: torch.device, notify: Notify) -> str:
    """The attention backend: the one that was written, else the best that serves here."""
    written = run.model.attn_implementation
    fits = device.type == "cuda" and run.train.enable_mixed_precision
    if written is None:
        chosen = "native" if fits else "sdpa"
        notify(f"attention: {chosen} (flash_attention_3, the documented default, is not available)")
        return chosen
    if written == "native" and not fits:
        raise CapabilityError(
            "model.attn_implementation is native, which needs a CUDA device and bf16.\n"
            "  Write sdpa, or leave it out to get the best there is."
        )
    return written


def shard_units(model: Decoder, basic_modules: list[str]) -> list[nn.Module]:
    """The modules that are gathered one at a time: what the user named inside layers, then layers.

    A name is a module's last name (`mlp`) or its class (`FeedForward`). Raises CapabilityError for
    one that is nowhere.
    """
    named = dict(model.named_modules())
    units: list[nn.Module] = []
    for wanted in basic_modules:
        found = [
            module
            for name, module in named.items()
            if name.rpartition(".")[2] == wanted or type(module).__name__ == wanted
        ]
        if not found:
            raise CapabilityError(
                f"model.basic_modules names {wanted}, and no module is called so."
            )
        units += found
    return [*units, *(layer for layer in model.model.layers if layer not in units)]


def load(
    model: Decoder, names: WeightMap, weights: Path | None, run: RunConfig, ranks: Ranks
) -> None:
    """Fill the empty model: base weights from `weights` or the seed, adapters from the seed."""
    seed = run.train.seed
    shapes = names.hf_shapes()

    def seeded(name: str) -> torch.Tensor:
        return names.from_hf(name, lambda hf: initialise(hf, shapes[hf], seed, names.config))

    def adapters_or(read: Read) -> Read:
        adapters = {
            name: tuple(parameter.shape)
            for name, parameter in model.named_parameters()
            if factor_of(name)
        }
        return lambda name: (
            initial_lora(name, adapters[name], seed) if name in adapters else read(name)
        )

    if weights is None:
        fill(model, adapters_or(seeded), readers="all_ranks", ranks=ranks)
        return
    readers = "all_ranks" if run.train.load_weights_mode == "all_ranks" else "first_rank"
    with SafetensorsFolder(weights) as folder:
        folder.require(shapes)

        def stored(name: str) -> torch.Tensor:
            return names.from_hf(name, folder.__getitem__)

        fill(model, adapters_or(stored), readers=readers, ranks=ranks)
