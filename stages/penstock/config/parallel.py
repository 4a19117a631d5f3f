"""How a model is cut over ranks. Whether the numbers fit a world is judged where the world is."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.config.availability import Later
from penstock.config.section import Section


def _ranks_or_rest(value: int) -> int:
    if value == -1 or value > 0:
        return value
    raise ValueError(f"is {value}; write a number of ranks, 1 or more, or -1 to have it filled in")


Ranks = Annotated[int, Field(gt=0)]
RanksOrRest = Annotated[int, AfterValidator(_ranks_or_rest)]


class ParallelConfig(Section):
    """The axes of the device mesh."""

    data_parallel_mode: Literal["none", "ddp", "fsdp2"] = "fsdp2"
    """Data parallelism: `none`, `ddp` (a whole model on each rank), or `fsdp2` (weights, gradients
    and optimizer state are sharded)."""

    data_parallel_shard_size: RanksOrRest = -1
    """Ranks that share one copy of the weights under `fsdp2`. -1: all that the other axes leave."""

    data_parallel_replicate_size: Annotated[RanksOrRest, Later(allowed=(1,))] = -1
    """Copies of the sharded weights (hybrid sharding). -1: one."""

    tensor_parallel_size: Annotated[Ranks, Later()] = 1
    """Ranks that split each weight matrix. Needs `merge_qkv: false`."""

    pipeline_parallel_size: Annotated[Ranks, Later()] = 1
    """Ranks that split the layers."""

    pipeline_parallel_schedule: Annotated[Literal["1F1B", "GPipe"], Later()] = "1F1B"
    """Order of micro-batches: `1F1B` holds fewer activations, `GPipe` is simpler."""

    pp_variable_seq_lengths: Annotated[bool, Later()] = True
    """Agree on the longest row of each pipeline step instead of padding all to one length."""

    expert_parallel_size: Annotated[Ranks, Later()] = 1
    """Ranks that share the experts of a mixture-of-experts model."""

    ulysses_parallel_size: Annotated[Ranks, Later()] = 1
    """Ranks that split a row by attention heads (Ulysses)."""

    ringattn_parallel_size: Annotated[Ranks, Later()] = 1
    """Ranks that split a row and pass keys and values around a ring."""

    cp_fsdp_mode: Annotated[Literal["all", "ulysses_only", "ring_only", "none"], Later()] = "all"
    """Which of the row-splitting axes FSDP also shards weights over."""

    reshard_after_forward: bool | None = None
    """`fsdp2`: free gathered weights after the forward pass (less memory) or keep them (less
    traffic). Unset: free them, except under pipeline parallelism."""

    ep_outside: Annotated[bool, Later()] = False
    """Place the expert axis outside of the axis that shards experts' weights."""
