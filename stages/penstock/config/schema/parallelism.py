"""How a model is cut over ranks. Whether the numbers fit a world is judged where the world is."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.cache_key import KeyedUnlessDefault, Unkeyed


def _ranks_or_rest(value: int) -> int:
    if value == -1 or value > 0:
        return value
    raise ValueError(f"is {value}; write a number of ranks, 1 or more, or -1 to have it filled in")


def _rising_from_0(value: Literal["uniform"] | list[int]) -> Literal["uniform"] | list[int]:
    if value == "uniform" or (value[:1] == [0] and value == sorted(value)):
        return value
    raise ValueError(f"is {value}; write the first layer of each stage, rising from 0, or uniform")


PipelineSchedule = Literal[
    "1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]

INTERLEAVED: tuple[PipelineSchedule, ...] = ("Interleaved1F1B", "InterleavedZeroBubble")
"""Schedules that go round the ranks several times."""

V_SHAPED: tuple[PipelineSchedule, ...] = ("ZBVZeroBubble", "DualPipeV")
"""Schedules that go down the ranks and up again."""

SPLIT_BACKWARD: tuple[PipelineSchedule, ...] = ("InterleavedZeroBubble", *V_SHAPED)
"""Schedules that compute the gradients of weights later than those of activations. They need the
weights kept between (with `reshard_after_forward: true` the gradients are silently wrong), and the
form of recomputation that is not reentrant."""

Ranks = Annotated[int, Field(gt=0)]
RanksOrRest = Annotated[int, AfterValidator(_ranks_or_rest)]


class ParallelConfig(ConfigSection):
    """The axes of the device mesh."""

    data_parallel_mode: Unkeyed[Literal["none", "ddp", "fsdp2"]] = "fsdp2"
    """Data parallelism: `none`, `ddp` (a whole model on each rank), or `fsdp2` (weights, gradients
    and optimizer state are sharded)."""

    data_parallel_shard_size: Unkeyed[RanksOrRest] = -1
    """Ranks that share one copy of the weights under `fsdp2`. -1: all that the other axes leave."""

    data_parallel_replicate_size: Unkeyed[RanksOrRest] = -1
    """Copies of the weights, each of which computes rows of its own: hybrid sharding under `fsdp2`.
    -1: one under `fsdp2`, under `ddp` all that the other axes leave."""

    zero_stage: Unkeyed[Literal[1, 2, 3] | None] = None
    """`fsdp2`: how long gathered weights are kept. 1: until the step ends, so that they are
    gathered once however many micro-batches it has; 2: until the backward pass has used them; 3:
    until the forward pass has used them. Unset: what `reshard_after_forward` and
    `enable_full_shard` say."""

    tensor_parallel_size: Unkeyed[Ranks] = 1
    """Ranks that split each weight matrix."""

    sequence_parallel: Unkeyed[bool] = False
    """Between attention and feed-forward, let each rank of `tensor_parallel_size` hold only its
    share of a row's tokens (Megatron's sequence parallelism): less memory, the same traffic."""

    tp_reduce_dtype: Unkeyed[Literal["bf16", "fp32"] | None] = None
    """Precision in which the ranks of `tensor_parallel_size` add up what layers give, and their
    gradients. `fp32` doubles the traffic of a run in bfloat16, and rounds once. Unset: that of the
    activations."""

    tp_vocab_parallel_loss: Unkeyed[bool] = True
    """Keep logits split by vocabulary over the ranks of `tensor_parallel_size` and compute the loss
    from the parts; false gathers them first."""

    pipeline_parallel_size: Unkeyed[Ranks] = 1
    """Ranks that split the layers."""

    pipeline_parallel_schedule: Unkeyed[PipelineSchedule] = "1F1B"
    """Order of micro-batches. `1F1B` holds few activations; `GPipe` is simpler and takes any number
    of micro-batches; `Interleaved1F1B` waits less, with several stages on each rank;
    `InterleavedZeroBubble`, `ZBVZeroBubble` and `DualPipeV` wait least, and keep weights whole
    through the step."""

    pipeline_parallel_virtual_stages: Unkeyed[int | None] = Field(default=None, gt=0)
    """Stages on each rank: 1 for `1F1B` and `GPipe`, 2 or more for the interleaved schedules, 2 for
    `ZBVZeroBubble` and `DualPipeV`. Unset: the least that the schedule can do with."""

    pipeline_parallel_split: Unkeyed[
        Annotated[Literal["uniform"] | list[int], AfterValidator(_rising_from_0)]
    ] = "uniform"
    """Layers of each stage: `uniform`, or the number of each stage's first layer, as in
    `[0, 5, 11, 17]`."""

    pipeline_parallel_input_weight: Unkeyed[int] = Field(default=1, ge=0)
    """How many layers the embedding counts for in a `uniform` split."""

    pipeline_parallel_output_weight: Unkeyed[int] = Field(default=1, ge=0)
    """How many layers the last norm, the head and the loss count for in a `uniform` split."""

    pp_variable_seq_lengths: Unkeyed[bool] = True
    """Pad the micro-batches of a pipeline's step to the longest of them; false pads all to the
    length of a full one, which never changes."""

    expert_parallel_size: Unkeyed[Ranks] = 1
    """Ranks that share the experts of a mixture-of-experts model."""

    ulysses_parallel_size: Unkeyed[Ranks] = 1
    """Ranks that split a row by tokens, and for attention by heads (Ulysses)."""

    ringattn_parallel_size: Unkeyed[Ranks] = 1
    """Ranks that split a row by tokens and pass keys and values around a ring."""

    cp_fsdp_mode: Unkeyed[Literal["all", "ulysses_only", "ring_only", "none"]] = "all"
    """`fsdp2`: over which of the axes that split a row weights are sharded too: `all` of them, or
    `none`, so that only `data_parallel_shard_size` shards."""

    reshard_after_forward: Unkeyed[bool | None] = None
    """`fsdp2`: free gathered weights after the forward pass (less memory) or keep them for the
    backward pass (less traffic). Unset: what `zero_stage` and `enable_full_shard` say; without them
    they are freed, except under pipeline parallelism."""

    fsdp_reduce_dtype: KeyedUnlessDefault[Literal["fp32", "bf16"]] = "fp32"
    """`fsdp2`: precision in which gradients are added up over ranks. `bf16` halves the traffic and
    rounds."""

    comm_bucket_mb: Unkeyed[int | None] = Field(default=None, gt=0)
    """`none` and `ddp`: MiB of gradients that ranks add up at once, while the backward pass goes
    on. More uses the network better, less begins earlier. Unset: 25."""

    ep_outside: Unkeyed[bool] = False
    """Place the expert axis outside of the axis that shards experts' weights."""

    @property
    def resolved_virtual_stages(self) -> int:
        """Stages on each rank: as written, or the least that the schedule can do with."""
        least = 2 if self.pipeline_parallel_schedule in INTERLEAVED + V_SHAPED else 1
        return self.pipeline_parallel_virtual_stages or least
