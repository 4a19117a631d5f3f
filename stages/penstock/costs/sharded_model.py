"""How a run is cut over its ranks, in the numbers that costs follow from. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.adapters.match_targets import Linear
from penstock.config.schema.run import RunConfig
from penstock.engine.distributed.parallel_dims import ParallelDims, accumulation_steps
from penstock.engine.distributed.reshard_policy import ReshardAfter, reshard_policy
from penstock.engine.distributed.validate_layout import micro_batch_padding
from penstock.engine.trainable import adapted, trainable_params
from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import Family
from penstock.models.flops import Learning
from penstock.models.quantization_config import QuantizationConfig
from penstock.models.tp_roles import ParallelStyle, find_parallel_style

Kind = Literal["cpu", "cuda"]
"""What computes: kernels, and so what they keep, differ."""

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Model:
    """What there is to cut: the same however it is cut, and found once."""

    config: DecoderConfig
    shapes: Mapping[str, tuple[int, ...]]
    """Of the model's parameters, by their names in it."""
    roles: Mapping[str, ParallelStyle | None]
    """Of its modules that have parameters."""
    adapters: tuple[Linear, ...]
    """The layers that bear one."""
    learning: Learning
    published: QuantizationConfig | None = None
    """How its weights are quantised already, where the run takes them so."""

    @classmethod
    def of(
        cls,
        run: RunConfig,
        family: Family,
        config: DecoderConfig,
        published: QuantizationConfig | None = None,
    ) -> "Model":
        """The model of a run."""
        names = family.weight_map(config, merge_qkv=run.model.merge_qkv)
        shapes = {name: names.native_shape(name) for name in names.native_names()}
        its = tuple(adapted(run, family, config)) if run.lora.enable_lora else ()
        modules = {name.rpartition(".")[0] for name in shapes} | {one.native for one in its}
        roles = {module: find_parallel_style(module, family.roles) for module in modules}
        return cls(config, shapes, roles, its, trainable_params(run, family, config), published)


@dataclass(frozen=True)
class Cut:
    """A run on so many ranks."""

    run: RunConfig
    model: Model
    degrees: ParallelDims
    kind: Kind

    @property
    def config(self) -> DecoderConfig:
        """The model's numbers."""
        return self.model.config

    @property
    def computes(self) -> int:
        """Bytes of a number in layers."""
        return WIDTHS[self.run.train.computes_in]

    @property
    def keeps(self) -> int:
        """Bytes of a number of a weight that learns."""
        return WIDTHS[self.run.train.keeps_in]

    @property
    def adds_up(self) -> int:
        """Bytes of a number of a gradient, once it is one of a whole step."""
        if self.is_sharded:
            return self.keeps
        return 2 if self.run.train.grad_accum_dtype == "bf16" else 4

    @property
    def shards(self) -> int:
        """Ranks that share most weights under fsdp2; 1 under the other modes."""
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
        """Ranks that share the weights of the experts that each of them holds."""
        if self.run.train.data_parallel_mode != "fsdp2":
            return 1
        degrees = self.degrees
        if degrees.expert == degrees.tensor == 1:
            return self.shards
        return degrees.world_size // degrees.pipeline // degrees.expert

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a rank in a step."""
        return accumulation_steps(self.run.train, self.degrees.num_replicas)

    @property
    def tokens(self) -> int:
        """Tokens of a full micro-batch on one rank, its share where ranks share a row."""
        multiple = micro_batch_padding(self.run.data, self.run.train)
        whole = self.run.train.micro_batch_size * self.run.data.row_length
        return -(-whole // multiple) * multiple // self.degrees.context

    @property
    def kept(self) -> ReshardAfter:
        """Until when gathered weights are kept under fsdp2."""
        return reshard_policy(self.run.train)

    @property
    def is_sharded(self) -> bool:
        """Whether fsdp2 gathers weights and casts them."""
        return self.run.train.data_parallel_mode == "fsdp2"

    @property
    def keeps_only_adapters(self) -> bool:
        """Whether the base model is nowhere but in its own checkpoint, and never changes."""
        return self.run.lora.enable_lora and not self.run.lora.merge_lora_interval
