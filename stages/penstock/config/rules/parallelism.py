"""Combinations of settings of the layout that cannot be honoured, whatever the number of ranks.

Whether sizes fit a world and a model is judged where these are known.
"""

from collections.abc import Mapping
from typing import Any

from penstock.config.loading.fault import ConfigIssue, shown
from penstock.config.rules.data import Faults
from penstock.config.schema.parallelism import SPLIT_BACKWARD
from penstock.config.schema.run import RunConfig

OF_SHARDS: Mapping[str, Any] = {
    "zero_stage": None,
    "enable_full_shard": True,
    "enable_fsdp_offload": False,
    "fsdp_reduce_dtype": "fp32",
    "cp_fsdp_mode": "all",
}
"""Settings that speak of sharded weights, with the value that asks for nothing."""

OF_DEEPEP = ("deepep_buffer_size_gb", "deepep_num_sms", "deepep_async_combine")
"""Settings of `ep_dispatch: deepep` alone."""

OVER_NVLINK = (2, 4, 8)
"""Ranks that it can send tokens between."""


def _only_fsdp2_shards(run: RunConfig) -> Faults:
    train = run.train
    if train.data_parallel_mode == "fsdp2":
        return
    for name, nothing in OF_SHARDS.items():
        value = getattr(train, name)
        if value != nothing:
            yield ConfigIssue(
                ("train", name),
                f"is {shown(value)}, and data_parallel_mode: {train.data_parallel_mode} shards no"
                f" weights; write data_parallel_mode: fsdp2 or leave {name} out",
                ("train.data_parallel_mode",),
            )


def _what_ranks_say_to_each_other_is_said(run: RunConfig) -> Faults:
    train = run.train
    if train.comm_bucket_mb and train.data_parallel_mode == "fsdp2":
        yield ConfigIssue(
            ("train", "comm_bucket_mb"),
            "fsdp2 adds gradients up layer by layer; write data_parallel_mode: ddp, or leave"
            " comm_bucket_mb out",
            ("train.data_parallel_mode",),
        )
    if train.tp_reduce_dtype and train.tensor_parallel_size == 1:
        yield ConfigIssue(
            ("train", "tp_reduce_dtype"),
            "nothing is added up with tensor_parallel_size: 1; write 2 or more, or leave"
            " tp_reduce_dtype out",
            ("train.tensor_parallel_size",),
        )


def _weights_are_kept_as_long_as_one_setting_says(run: RunConfig) -> Faults:
    train = run.train
    stage, reshard, full = train.zero_stage, train.reshard_after_forward, train.enable_full_shard
    if stage is not None and reshard is not None and reshard != (stage == 3):
        yield ConfigIssue(
            ("train", "zero_stage"),
            f"stage {stage} {'frees' if stage == 3 else 'keeps'} weights after the forward pass,"
            f" and reshard_after_forward is {shown(reshard)}; write zero_stage:"
            f" {3 if reshard else 2}, or leave reshard_after_forward out",
            ("train.reshard_after_forward",),
        )
    if stage == 3 and not full:
        yield ConfigIssue(
            ("train", "zero_stage"),
            "stage 3 frees weights after the forward pass, and enable_full_shard is false; write"
            " zero_stage: 2, or leave enable_full_shard out",
            ("train.enable_full_shard",),
        )
    if reshard and not full:
        yield ConfigIssue(
            ("train", "enable_full_shard"),
            "false keeps weights after the forward pass, and reshard_after_forward: true frees"
            " them; write enable_full_shard: true, or leave reshard_after_forward out",
            ("train.reshard_after_forward",),
        )


def _a_split_backward_pass_finds_its_weights(run: RunConfig) -> Faults:
    train, schedule = run.train, run.train.pipeline_parallel_schedule
    if train.pipeline_parallel_size == 1 or schedule not in SPLIT_BACKWARD:
        return
    reads = ("train.pipeline_parallel_schedule", "train.pipeline_parallel_size")
    why = f"pipeline_parallel_schedule: {schedule} computes the gradients of weights later"
    if train.reshard_after_forward:
        yield ConfigIssue(
            ("train", "reshard_after_forward"),
            f"{why}, from weights that true has freed; write reshard_after_forward: false",
            reads,
        )
    if train.zero_stage == 3:
        yield ConfigIssue(
            ("train", "zero_stage"),
            f"{why}, from weights that stage 3 has freed; write zero_stage: 2",
            reads,
        )
    if train.enable_reentrant and train.enable_gradient_checkpointing:
        yield ConfigIssue(
            ("train", "enable_reentrant"),
            f"{why}, which the reentrant form of recomputation cannot; write"
            " enable_reentrant: false",
            reads,
        )


def _a_row_is_split_over_several_ranks(run: RunConfig) -> Faults:
    if run.train.sequence_parallel and run.train.tensor_parallel_size == 1:
        yield ConfigIssue(
            ("train", "sequence_parallel"),
            "splits tokens over the ranks of tensor_parallel_size, which is 1; write"
            " tensor_parallel_size: 2 or more, or sequence_parallel: false",
            ("train.tensor_parallel_size",),
        )


def _stages_are_those_of_a_pipeline(run: RunConfig) -> Faults:
    train = run.train
    wished = {
        "pipeline_parallel_virtual_stages": (train.pipeline_parallel_virtual_stages or 1) > 1,
        "pipeline_parallel_split": train.pipeline_parallel_split != "uniform",
    }
    if train.pipeline_parallel_size == 1:
        for name in (name for name, is_wished in wished.items() if is_wished):
            yield ConfigIssue(
                ("train", name),
                "there are no stages with pipeline_parallel_size: 1; write"
                f" pipeline_parallel_size: 2 or more, or leave {name} out",
                ("train.pipeline_parallel_size",),
            )
    for name in ("pipeline_parallel_input_weight", "pipeline_parallel_output_weight"):
        if train.pipeline_parallel_split != "uniform" and getattr(train, name) != 1:
            yield ConfigIssue(
                ("train", name),
                f"weighs a uniform split, and pipeline_parallel_split lists the layers; leave"
                f" {name} out, or write pipeline_parallel_split: uniform",
                ("train.pipeline_parallel_split",),
            )


def _tokens_travel_over_nvlink(run: RunConfig) -> Faults:
    model, train = run.model, run.train
    if model.ep_dispatch != "deepep":
        for name in OF_DEEPEP:
            if model.asks_for(name):
                yield ConfigIssue(
                    ("model", name),
                    f"is {shown(getattr(model, name))}, and ep_dispatch: {model.ep_dispatch} has no"
                    f" such thing; write ep_dispatch: deepep or leave {name} out",
                    ("model.ep_dispatch",),
                )
        return
    size = train.expert_parallel_size
    if size not in OVER_NVLINK:
        near = min(OVER_NVLINK, key=lambda other: abs(other - size))
        yield ConfigIssue(
            ("model", "ep_dispatch"),
            "deepep sends tokens between 2, 4 or 8 ranks of one machine, and"
            f" expert_parallel_size is {size}; write train.expert_parallel_size: {near}, or"
            " ep_dispatch: alltoall",
            ("train.expert_parallel_size",),
        )
    if train.computes_in != "bfloat16":
        yield ConfigIssue(
            ("model", "ep_dispatch"),
            f"deepep sends bfloat16 alone, and this run computes in {train.computes_in}; write"
            " train.precision: bf16_mixed, or ep_dispatch: alltoall",
            ("train.enable_mixed_precision", "train.precision"),
        )


LAYOUT_RULES = (
    _only_fsdp2_shards,
    _what_ranks_say_to_each_other_is_said,
    _weights_are_kept_as_long_as_one_setting_says,
    _a_split_backward_pass_finds_its_weights,
    _a_row_is_split_over_several_ranks,
    _stages_are_those_of_a_pipeline,
    _tokens_travel_over_nvlink,
)
