"""The parallel layout. Rules that need the world size are in
`engine/distributed/validate_layout.py`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.config.schema.base import ConfigSection, require
from penstock.config.schema.cache_key import KeyedUnlessDefault, Unkeyed
from penstock.config.schema.effect import NativeOnly, NotWith, OnlyWith
from penstock.config.schema.served import Served

# As many as `launch.nproc_per_node` on each of `launch.nnodes` can be.
MAX_RANKS = 1024 * 100_000


PipelineSchedule = Literal[
    "1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]

# Schedules with several stages on each rank, in the order of the ranks.
INTERLEAVED: tuple[PipelineSchedule, ...] = ("Interleaved1F1B", "InterleavedZeroBubble")

# Schedules with two stages on each rank: first in the order of the ranks, then in reverse.
V_SHAPED: tuple[PipelineSchedule, ...] = ("ZBVZeroBubble", "DualPipeV")

# Schedules that compute the gradients of weights later than those of activations. They need weights
# that are not freed in between (with `reshard_after_forward: true` the gradients are silently
# wrong), and non-reentrant activation checkpointing.
SPLIT_BACKWARD: tuple[PipelineSchedule, ...] = ("InterleavedZeroBubble", *V_SHAPED)

FSDP2 = OnlyWith(
    "train.data_parallel_mode",
    ("fsdp2",),
    why="is {own}, but {name}: {value} does not shard weights",
)
PIPELINE = OnlyWith(
    "train.pipeline_parallel_size",
    unless=(1,),
    spares=(1,),
    words="pipeline_parallel_size: 2 or more",
    why="there are no pipeline stages with {name}: {value}",
)
UNIFORM = OnlyWith(
    "train.pipeline_parallel_split",
    ("uniform",),
    why="is for a uniform split, and {name} lists the layers",
)


def _freed(value: Any, cause: str, instead: str) -> NotWith:
    # What frees weights whose gradients are computed later.
    return NotWith(
        "train.split_backward_schedule",
        unless=(None,),
        of=(value,),
        why="pipeline_parallel_schedule: {value} computes the gradients of weights later, from"
        f" weights that {cause} has freed",
        instead=instead,
        reads=("train.pipeline_parallel_schedule", "train.pipeline_parallel_size"),
    )


def _synced_once(setting: str, why: str, **matched: tuple[Any, ...]) -> NotWith:
    # What does not go with a reduction after each micro-batch.
    return NotWith(
        setting,
        of=("micro_batch",),
        why=f"is micro_batch, and {why}",
        instead="write fsdp_gradient_sync: step, or leave it out",
        **matched,
    )


SPLITS = NativeOnly(
    "the model's own code runs whole on every rank",
    "data_parallel_shard_size, which shards the weights instead",
)

Ranks = Annotated[int, Field(gt=0, le=MAX_RANKS)]
RanksOrRest = Annotated[
    int,
    require(lambda ranks: ranks <= MAX_RANKS, f"is {{value}}; it must be at most {MAX_RANKS}"),
    require(
        lambda ranks: ranks == -1 or ranks > 0,
        "is {value}; write a number of ranks, 1 or more, or -1 for all that are left",
    ),
]


class ParallelConfig(ConfigSection):
    """Parallelism: the axes of the device mesh."""

    data_parallel_mode: Annotated[Unkeyed[Literal["none", "ddp", "fsdp2"]], Served()] = "fsdp2"
    """Data parallelism: `none`, `ddp` (the whole model on each rank), or `fsdp2` (weights,
    gradients and optimizer states are sharded). Where it is not written, one process on CPUs
    whose memory has room for it trains with `none`."""

    data_parallel_shard_size: Annotated[Unkeyed[RanksOrRest], Served(default=1)] = -1
    """`fsdp2`: number of ranks over which one copy of the weights is sharded. -1: all ranks that
    the other axes leave."""

    data_parallel_replicate_size: Annotated[Unkeyed[RanksOrRest], Served(default=1)] = -1
    """Number of replicas of the weights, each of which trains on different sequences: DDP, or
    hybrid sharding (HSDP) under `fsdp2`. -1: 1 under `fsdp2`; under `ddp` all ranks that the other
    axes leave."""

    zero_stage: Annotated[
        Unkeyed[Literal[1, 2, 3] | None],
        FSDP2,
        NotWith(
            "train.enable_full_shard",
            (False,),
            of=(3,),
            why="stage 3 frees weights after the forward pass, and {name} is false",
            instead="write zero_stage: 2, or leave {name} out",
        ),
        _freed(3, "stage 3", "write zero_stage: 2"),
    ] = None
    """`fsdp2`: ZeRO stage, how long all-gathered weights are kept. 1: until the step ends, so they
    are gathered once for all micro-batches; 2: until the backward pass has used them; 3: until the
    forward pass has used them. Unset: from `reshard_after_forward` and `enable_full_shard`."""

    tensor_parallel_size: Annotated[Unkeyed[Ranks], Served(), SPLITS] = 1
    """Tensor parallelism: number of ranks over which each weight matrix is sharded."""

    sequence_parallel: Annotated[
        Unkeyed[bool],
        OnlyWith(
            "train.tensor_parallel_size",
            unless=(1,),
            words="tensor_parallel_size: 2 or more",
            why="distributes tokens over the ranks of {name}, which is {value}",
        ),
        SPLITS,
    ] = False
    """Sequence parallelism (Megatron-LM): between attention and feed-forward network, each rank of
    `tensor_parallel_size` holds only its part of a sequence's tokens. Less memory, the same
    traffic."""

    tp_reduce_dtype: Annotated[
        Unkeyed[Literal["fp32", "bf16"] | None],
        OnlyWith(
            "train.tensor_parallel_size",
            unless=(1,),
            words="tensor_parallel_size: 2 or more",
            why="there is no reduction with {name}: {value}",
        ),
    ] = None
    """Tensor parallelism: dtype in which the ranks of `tensor_parallel_size` reduce outputs and
    gradients of layers. `fp32` doubles the traffic of a bfloat16 run and rounds only once. Unset:
    the dtype of the activations."""

    tp_vocab_parallel_loss: Unkeyed[bool] = True
    """Vocab-parallel loss: keep logits sharded by vocabulary over the ranks of
    `tensor_parallel_size` and compute the loss from the shards; false all-gathers them first."""

    pipeline_parallel_size: Annotated[Unkeyed[Ranks], Served(), SPLITS] = 1
    """Pipeline parallelism: number of ranks over which the layers are distributed."""

    pipeline_parallel_schedule: Unkeyed[PipelineSchedule] = "1F1B"
    """Pipeline schedule. `1F1B` stores few activations; `GPipe` is simpler and takes any number of
    micro-batches; `Interleaved1F1B` has smaller bubbles, with several stages on each rank;
    `InterleavedZeroBubble`, `ZBVZeroBubble` and `DualPipeV` have the smallest, and keep gathered
    weights through the step."""

    pipeline_parallel_virtual_stages: Annotated[Unkeyed[int | None], PIPELINE] = Field(
        default=None, gt=0
    )
    """Pipeline stages on each rank: 1 for `1F1B` and `GPipe`, 2 or more for the interleaved
    schedules, 2 for `ZBVZeroBubble` and `DualPipeV`. Unset: the minimum of the schedule."""

    pipeline_parallel_split: Annotated[
        Unkeyed[Literal["uniform"] | list[int]],
        require(
            lambda split: split == "uniform" or (split[:1] == [0] and split == sorted(split)),
            "is {value}; write the first layer of each stage, rising from 0, or uniform",
        ),
        PIPELINE,
    ] = "uniform"
    """Layers of each pipeline stage: `uniform`, stages of equal cost as far as whole layers allow,
    or the index of each stage's first layer, for example `[0, 5, 11, 17]`."""

    pipeline_parallel_input_weight: Annotated[Unkeyed[int], UNIFORM] = Field(default=1, ge=0)
    """Number of layers of average cost that the embedding counts as in a `uniform` split."""

    pipeline_parallel_output_weight: Annotated[Unkeyed[int], UNIFORM] = Field(default=1, ge=0)
    """Number of layers of average cost that the final norm, the LM head and the loss count as in a
    `uniform` split."""

    pp_variable_seq_lengths: Annotated[Unkeyed[bool], Served()] = True
    """Pipeline parallelism: pad the micro-batches of a step to the longest of them; false pads all
    to the maximum length, so shapes never change."""

    expert_parallel_size: Annotated[Unkeyed[Ranks], Served(), SPLITS] = 1
    """Expert parallelism: number of ranks over which the experts of an MoE layer are
    distributed."""

    ulysses_parallel_size: Annotated[Unkeyed[Ranks], Served(), SPLITS] = 1
    """Context parallelism (Ulysses): number of ranks over which a sequence is split by tokens, and
    by heads for attention."""

    ringattn_parallel_size: Annotated[Unkeyed[Ranks], Served(), SPLITS] = 1
    """Context parallelism (ring attention): number of ranks over which a sequence is split by
    tokens; keys and values are passed around a ring."""

    cp_fsdp_mode: Annotated[
        Unkeyed[Literal["all", "ulysses_only", "ring_only", "none"]], FSDP2, Served()
    ] = "all"
    """`fsdp2`: context-parallel axes over which weights are sharded too: `all`, `ulysses_only`,
    `ring_only` or `none`, with which only `data_parallel_shard_size` shards."""

    reshard_after_forward: Annotated[
        Unkeyed[bool | None],
        _freed(True, "true", "write reshard_after_forward: false"),
        Served(
            documented=True,
            doc="`fsdp2`: free all-gathered weights after the forward pass (less memory) or keep "
            "them for the backward pass (less traffic).",
        ),
    ] = None
    """`fsdp2`: free all-gathered weights after the forward pass (less memory) or keep them for the
    backward pass (less traffic). Unset: from `zero_stage` and `enable_full_shard`; without these
    they are freed, except with pipeline parallelism."""

    fsdp_reduce_dtype: Annotated[KeyedUnlessDefault[Literal["fp32", "bf16"]], FSDP2] = "fp32"
    """`fsdp2`: dtype in which gradients are reduced over ranks. `bf16` halves the traffic and
    rounds."""

    fsdp_gradient_sync: Annotated[
        Unkeyed[Literal["micro_batch", "step"] | None],
        FSDP2,
        _synced_once(
            "train.pipeline_parallel_size",
            "pipeline schedules reduce gradients once a step",
            unless=(1,),
        ),
        _synced_once(
            "train.fsdp_reduce_dtype",
            "each reduction would be rounded to bfloat16",
            values=("bf16",),
        ),
        _synced_once(
            "train.keeps_in",
            "shards would accumulate in the weights' {value}",
            values=("bfloat16",),
            reads=("train.precision",),
        ),
    ] = None
    """`fsdp2`: reduce-scatter gradients after every micro-batch, so that each rank accumulates only
    its shard, or once a step (`no_sync`): less traffic, but every rank accumulates unsharded fp32
    gradients. Unset: `micro_batch`; `step` with pipeline parallelism, and where weights or the
    reduction are in bfloat16, because shards accumulate in the dtype of the weights."""

    comm_bucket_mb: Annotated[
        Unkeyed[int | None],
        OnlyWith(
            "train.data_parallel_mode",
            ("none", "ddp"),
            words="data_parallel_mode: ddp",
            why="fsdp2 reduces gradients layer by layer",
        ),
    ] = Field(default=None, gt=0)
    """`none` and `ddp`: size in MiB of the gradient buckets that are all-reduced during the
    backward pass. Larger buckets use the network better, smaller ones start earlier. Unset: 25."""

    ep_outside: Annotated[Unkeyed[bool], SPLITS] = False
    """Expert parallelism: form expert-parallel groups of ranks that are as far apart as possible,
    and shard experts over neighboring ranks; false does the reverse."""

    @property
    def split_backward_schedule(self) -> PipelineSchedule | None:
        """The pipeline schedule, if it computes the gradients of weights later."""
        schedule = self.pipeline_parallel_schedule
        is_split = self.pipeline_parallel_size > 1 and schedule in SPLIT_BACKWARD
        return schedule if is_split else None

    @property
    def resolved_virtual_stages(self) -> int:
        """Pipeline stages on each rank: as written, or the minimum of the schedule."""
        least = 2 if self.pipeline_parallel_schedule in INTERLEAVED + V_SHAPED else 1
        return self.pipeline_parallel_virtual_stages or least
