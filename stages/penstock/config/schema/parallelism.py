"""The parallel layout. Rules that need the world size are in
`engine/distributed/validate_layout.py`."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.cache_key import KeyedUnlessDefault, Unkeyed

MAX_RANKS = 1024 * 100_000
"""As many as `launch.nproc_per_node` on each of `launch.nnodes` can be."""


def _check_ranks(value: int) -> int:
    if value > MAX_RANKS:
        raise ValueError(f"is {value}; it must be at most {MAX_RANKS}")
    if value == -1 or value > 0:
        return value
    raise ValueError(f"is {value}; write a number of ranks, 1 or more, or -1 for all that are left")


def _check_split(value: Literal["uniform"] | list[int]) -> Literal["uniform"] | list[int]:
    if value == "uniform" or (value[:1] == [0] and value == sorted(value)):
        return value
    raise ValueError(f"is {value}; write the first layer of each stage, rising from 0, or uniform")


PipelineSchedule = Literal[
    "1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]

INTERLEAVED: tuple[PipelineSchedule, ...] = ("Interleaved1F1B", "InterleavedZeroBubble")
"""Schedules with several stages on each rank, in the order of the ranks."""

V_SHAPED: tuple[PipelineSchedule, ...] = ("ZBVZeroBubble", "DualPipeV")
"""Schedules with two stages on each rank: first in the order of the ranks, then in reverse."""

SPLIT_BACKWARD: tuple[PipelineSchedule, ...] = ("InterleavedZeroBubble", *V_SHAPED)
"""Schedules that compute the gradients of weights later than those of activations. They need
weights that are not freed in between (with `reshard_after_forward: true` the gradients are silently
wrong), and non-reentrant activation checkpointing."""

Ranks = Annotated[int, Field(gt=0, le=MAX_RANKS)]
RanksOrRest = Annotated[int, AfterValidator(_check_ranks)]


class ParallelConfig(ConfigSection):
    """Parallelism: the axes of the device mesh."""

    data_parallel_mode: Unkeyed[Literal["none", "ddp", "fsdp2"]] = "fsdp2"
    """Data parallelism: `none`, `ddp` (the whole model on each rank), or `fsdp2` (weights,
    gradients and optimizer states are sharded). Where it is not written, one process on CPUs
    whose memory has room for it trains with `none`."""

    data_parallel_shard_size: Unkeyed[RanksOrRest] = -1
    """`fsdp2`: number of ranks over which one copy of the weights is sharded. -1: all ranks that
    the other axes leave."""

    data_parallel_replicate_size: Unkeyed[RanksOrRest] = -1
    """Number of replicas of the weights, each of which trains on different sequences: DDP, or
    hybrid sharding (HSDP) under `fsdp2`. -1: 1 under `fsdp2`; under `ddp` all ranks that the other
    axes leave."""

    zero_stage: Unkeyed[Literal[1, 2, 3] | None] = None
    """`fsdp2`: ZeRO stage, how long all-gathered weights are kept. 1: until the step ends, so they
    are gathered once for all micro-batches; 2: until the backward pass has used them; 3: until the
    forward pass has used them. Unset: from `reshard_after_forward` and `enable_full_shard`."""

    tensor_parallel_size: Unkeyed[Ranks] = 1
    """Tensor parallelism: number of ranks over which each weight matrix is sharded."""

    sequence_parallel: Unkeyed[bool] = False
    """Sequence parallelism (Megatron-LM): between attention and feed-forward network, each rank of
    `tensor_parallel_size` holds only its part of a sequence's tokens. Less memory, the same
    traffic."""

    tp_reduce_dtype: Unkeyed[Literal["fp32", "bf16"] | None] = None
    """Tensor parallelism: dtype in which the ranks of `tensor_parallel_size` reduce outputs and
    gradients of layers. `fp32` doubles the traffic of a bfloat16 run and rounds only once. Unset:
    the dtype of the activations."""

    tp_vocab_parallel_loss: Unkeyed[bool] = True
    """Vocab-parallel loss: keep logits sharded by vocabulary over the ranks of
    `tensor_parallel_size` and compute the loss from the shards; false all-gathers them first."""

    pipeline_parallel_size: Unkeyed[Ranks] = 1
    """Pipeline parallelism: number of ranks over which the layers are distributed."""

    pipeline_parallel_schedule: Unkeyed[PipelineSchedule] = "1F1B"
    """Pipeline schedule. `1F1B` stores few activations; `GPipe` is simpler and takes any number of
    micro-batches; `Interleaved1F1B` has smaller bubbles, with several stages on each rank;
    `InterleavedZeroBubble`, `ZBVZeroBubble` and `DualPipeV` have the smallest, and keep gathered
    weights through the step."""

    pipeline_parallel_virtual_stages: Unkeyed[int | None] = Field(default=None, gt=0)
    """Pipeline stages on each rank: 1 for `1F1B` and `GPipe`, 2 or more for the interleaved
    schedules, 2 for `ZBVZeroBubble` and `DualPipeV`. Unset: the minimum of the schedule."""

    pipeline_parallel_split: Unkeyed[
        Annotated[Literal["uniform"] | list[int], AfterValidator(_check_split)]
    ] = "uniform"
    """Layers of each pipeline stage: `uniform`, stages of equal cost as far as whole layers allow,
    or the index of each stage's first layer, for example `[0, 5, 11, 17]`."""

    pipeline_parallel_input_weight: Unkeyed[int] = Field(default=1, ge=0)
    """Number of layers of average cost that the embedding counts as in a `uniform` split."""

    pipeline_parallel_output_weight: Unkeyed[int] = Field(default=1, ge=0)
    """Number of layers of average cost that the final norm, the LM head and the loss count as in a
    `uniform` split."""

    pp_variable_seq_lengths: Unkeyed[bool] = True
    """Pipeline parallelism: pad the micro-batches of a step to the longest of them; false pads all
    to the maximum length, so shapes never change."""

    expert_parallel_size: Unkeyed[Ranks] = 1
    """Expert parallelism: number of ranks over which the experts of an MoE layer are
    distributed."""

    ulysses_parallel_size: Unkeyed[Ranks] = 1
    """Context parallelism (Ulysses): number of ranks over which a sequence is split by tokens, and
    by heads for attention."""

    ringattn_parallel_size: Unkeyed[Ranks] = 1
    """Context parallelism (ring attention): number of ranks over which a sequence is split by
    tokens; keys and values are passed around a ring."""

    cp_fsdp_mode: Unkeyed[Literal["all", "ulysses_only", "ring_only", "none"]] = "all"
    """`fsdp2`: context-parallel axes over which weights are sharded too: `all`, `ulysses_only`,
    `ring_only` or `none`, with which only `data_parallel_shard_size` shards."""

    reshard_after_forward: Unkeyed[bool | None] = None
    """`fsdp2`: free all-gathered weights after the forward pass (less memory) or keep them for the
    backward pass (less traffic). Unset: from `zero_stage` and `enable_full_shard`; without these
    they are freed, except with pipeline parallelism."""

    fsdp_reduce_dtype: KeyedUnlessDefault[Literal["fp32", "bf16"]] = "fp32"
    """`fsdp2`: dtype in which gradients are reduced over ranks. `bf16` halves the traffic and
    rounds."""

    fsdp_gradient_sync: Unkeyed[Literal["micro_batch", "step"] | None] = None
    """`fsdp2`: reduce-scatter gradients after every micro-batch, so that each rank accumulates only
    its shard, or once a step (`no_sync`): less traffic, but every rank accumulates unsharded fp32
    gradients. Unset: `micro_batch`; `step` with pipeline parallelism, and where weights or the
    reduction are in bfloat16, because shards accumulate in the dtype of the weights."""

    comm_bucket_mb: Unkeyed[int | None] = Field(default=None, gt=0)
    """`none` and `ddp`: size in MiB of the gradient buckets that are all-reduced during the
    backward pass. Larger buckets use the network better, smaller ones start earlier. Unset: 25."""

    ep_outside: Unkeyed[bool] = False
    """Expert parallelism: form expert-parallel groups of ranks that are as far apart as possible,
    and shard experts over neighboring ranks; false does the reverse."""

    @property
    def resolved_virtual_stages(self) -> int:
        """Pipeline stages on each rank: as written, or the minimum of the schedule."""
        least = 2 if self.pipeline_parallel_schedule in INTERLEAVED + V_SHAPED else 1
        return self.pipeline_parallel_virtual_stages or least
