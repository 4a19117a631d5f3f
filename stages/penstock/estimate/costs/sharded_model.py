"""How a run is sharded over its ranks, as inputs of the cost estimates. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from penstock.adapters.match_targets import TargetLayer
from penstock.config.schema.run import RunConfig
from penstock.engine.distributed.parallel_dims import (
    ParallelDims,
    ReshardAfter,
    accumulation_steps,
    reshard_policy,
)
from penstock.engine.distributed.validate_layout import micro_batch_padding
from penstock.engine.trainable import adapted, trainable_params
from penstock.estimate.costs.vision import VisionWork
from penstock.models.automodel.outline import AutoModelConfig, ModelOutline
from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import Family
from penstock.models.flops import TrainableParams
from penstock.models.names import EMBEDDING_WEIGHT, HEAD_WEIGHT
from penstock.models.quantization_config import QuantizationConfig
from penstock.models.tp_roles import ParallelStyle, find_parallel_style
from penstock.models.weights import LAYERS

Kind = Literal["cpu", "cuda"]
"""Device type: CPU and CUDA kernels save different tensors for backward."""

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class UnshardedModel:
    """The unsharded model, independent of the layout."""

    config: DecoderConfig
    shapes: Mapping[str, tuple[int, ...]]
    """Parameter shapes by name."""
    roles: Mapping[str, ParallelStyle | None]
    """Parallel style of each module with parameters."""
    adapters: tuple[TargetLayer, ...]
    """Layers with an adapter."""
    trainable: TrainableParams
    quantization: QuantizationConfig | None = None
    """Quantization of a pre-quantized checkpoint, if the run uses it."""
    vision: VisionWork | None = None
    """Its vision part and images, if the data has any."""

    @classmethod
    def from_run(
        cls,
        run: RunConfig,
        family: Family,
        config: DecoderConfig,
        published: QuantizationConfig | None = None,
    ) -> "UnshardedModel":
        """Build the model of a run."""
        names = family.weight_map(config, merge_qkv=run.model.merge_qkv)
        shapes = {name: names.native_shape(name) for name in names.native_names()}
        target_layers = tuple(adapted(run, family, config)) if run.lora.enable_lora else ()
        if isinstance(config, AutoModelConfig):
            shapes = {decoder_name(name, config.outline): shape for name, shape in shapes.items()}
            target_layers = tuple(_renamed(layer, config.outline) for layer in target_layers)
        modules = {name.rpartition(".")[0] for name in shapes} | {
            layer.native for layer in target_layers
        }
        roles = {module: find_parallel_style(module, family.roles) for module in modules}
        return cls(
            config, shapes, roles, target_layers, trainable_params(run, family, config), published
        )


def decoder_name(name: str, outline: ModelOutline) -> str:
    """The name of a transformers model's parameter, or module, with those of a decoder for layers,
    embedding and head."""
    for number, layer in enumerate(outline.layers):
        if name.startswith(f"{layer}."):
            return f"{LAYERS}{number}{name.removeprefix(layer)}"
    ends = {outline.embedding: EMBEDDING_WEIGHT, outline.head: HEAD_WEIGHT}
    module = name.removesuffix(".weight")
    if decoder := ends.get(module):
        return decoder if name != module else decoder.removesuffix(".weight")
    return name


def _renamed(layer: TargetLayer, outline: ModelOutline) -> TargetLayer:
    native, of = (decoder_name(name, outline) for name in (layer.native, layer.of))
    return replace(layer, native=native, of=of)


@dataclass(frozen=True)
class ShardedModel:
    """A run with its parallel layout and device type."""

    run: RunConfig
    model: UnshardedModel
    degrees: ParallelDims
    kind: Kind

    @property
    def config(self) -> DecoderConfig:
        """The model config."""
        return self.model.config

    @property
    def compute_bytes(self) -> int:
        """Bytes per element of the compute dtype."""
        return WIDTHS[self.run.train.computes_in]

    @property
    def param_bytes(self) -> int:
        """Bytes per element of trainable weights."""
        return WIDTHS[self.run.train.keeps_in]

    @property
    def grad_bytes(self) -> int:
        """Bytes per element of accumulated gradients."""
        if self.is_sharded:
            return self.param_bytes
        return 2 if self.run.train.grad_accum_dtype == "bf16" else 4

    @property
    def shards(self) -> int:
        """FSDP shards of dense weights with fsdp2; 1 with the other modes."""
        if self.run.train.data_parallel_mode != "fsdp2":
            return 1
        folded = {
            "all": self.degrees.context,
            "ulysses_only": self.degrees.ulysses,
            "ring_only": self.degrees.ring,
            "none": 1,
        }
        return self.degrees.shard * folded[self.run.train.cp_fsdp_mode]

    @property
    def expert_shards(self) -> int:
        """FSDP shards of expert weights."""
        if self.run.train.data_parallel_mode != "fsdp2":
            return 1
        degrees = self.degrees
        if degrees.expert == degrees.tensor == 1:
            return self.shards
        # Tensor parallelism does not split experts, so its ranks shard them too.
        return degrees.world_size // degrees.pipeline // degrees.expert

    @property
    def micro_batches(self) -> int:
        """Micro-batches per rank and step (gradient accumulation)."""
        return accumulation_steps(self.run.train, self.degrees.num_replicas)

    @property
    def tokens(self) -> int:
        """Tokens of a full micro-batch on one rank; with context parallelism, its shard."""
        multiple = micro_batch_padding(self.run.data, self.run.train)
        tokens = self.run.train.rows_at_once * self.run.data.row_length
        return -(-tokens // multiple) * multiple // self.degrees.context

    @property
    def reshard_after(self) -> ReshardAfter:
        """When gathered weights are freed with fsdp2 (reshard_after_forward)."""
        return reshard_policy(self.run.train)

    @property
    def is_sharded(self) -> bool:
        """Whether fsdp2 shards the weights, and so gathers and casts them."""
        return self.run.train.data_parallel_mode == "fsdp2"

    @property
    def has_edge_units(self) -> bool:
        """Whether FSDP gathers and reduces the embedding and the head apart from each other: not if
        they are tied or called again to predict further tokens, and not in a pipeline, whose
        stages keep theirs gathered."""
        is_apart = not (self.config.tie_word_embeddings or self.config.num_mtp_layers)
        return self.is_sharded and self.degrees.pipeline == 1 and is_apart

    @property
    def saves_only_adapters(self) -> bool:
        """Whether checkpoints have only adapters: LoRA without merging (ReLoRA)."""
        return self.run.lora.enable_lora and not self.run.lora.merge_lora_interval
