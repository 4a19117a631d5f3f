"""Combinations of parallelism settings that are invalid for any number of ranks.

Whether sizes fit the world size and the model is checked where these are known.
"""

from collections.abc import Mapping
from typing import Any

from penstock.config.loading.fault import ConfigIssue, shown
from penstock.config.rules.data import Issues
from penstock.config.schema.parallelism import SPLIT_BACKWARD
from penstock.config.schema.run import RunConfig

FSDP2_FIELDS: Mapping[str, Any] = {
    "zero_stage": None,
    "enable_full_shard": True,
    "enable_fsdp_offload": False,
    "fsdp_reduce_dtype": "fp32",
    "fsdp_gradient_sync": None,
    "cp_fsdp_mode": "all",
}
"""Settings of sharded weights, with the value that has no effect."""

DEEPEP_SIZES = (2, 4, 8)
"""Expert-parallel sizes that DeepEP supports over NVLink."""


def _check_fsdp2_fields(run: RunConfig) -> Issues:
    train = run.train
    if train.data_parallel_mode == "fsdp2":
        return
    for name, unused in FSDP2_FIELDS.items():
        value = getattr(train, name)
        if value != unused:
            yield ConfigIssue(
                ("train", name),
                f"is {shown(value)}, but data_parallel_mode: {train.data_parallel_mode} does not"
                f" shard weights; write data_parallel_mode: fsdp2 or leave {name} out",
                ("train.data_parallel_mode",),
            )


def _check_gradient_sync(run: RunConfig) -> Issues:
    train = run.train
    if train.data_parallel_mode != "fsdp2" or train.fsdp_gradient_sync != "micro_batch":
        return
    conflicts = {
        "pipeline_parallel_size": (
            train.pipeline_parallel_size > 1,
            "pipeline schedules reduce gradients once a step",
        ),
        "fsdp_reduce_dtype": (
            train.fsdp_reduce_dtype != "fp32",
            "each reduction would be rounded to bfloat16",
        ),
        "precision": (
            train.keeps_in != "float32",
            f"shards would accumulate in the weights' {train.keeps_in}",
        ),
    }
    for name, (is_set, why) in conflicts.items():
        if is_set:
            yield ConfigIssue(
                ("train", "fsdp_gradient_sync"),
                f"is micro_batch, and {why}; write fsdp_gradient_sync: step, or leave it out",
                (f"train.{name}",),
            )
            return


def _check_reductions(run: RunConfig) -> Issues:
    train = run.train
    if train.comm_bucket_mb and train.data_parallel_mode == "fsdp2":
        yield ConfigIssue(
            ("train", "comm_bucket_mb"),
            "fsdp2 reduces gradients layer by layer; write data_parallel_mode: ddp, or leave"
            " comm_bucket_mb out",
            ("train.data_parallel_mode",),
        )
    if train.tp_reduce_dtype and train.tensor_parallel_size == 1:
        yield ConfigIssue(
            ("train", "tp_reduce_dtype"),
            "there is no reduction with tensor_parallel_size: 1; write 2 or more, or leave"
            " tp_reduce_dtype out",
            ("train.tensor_parallel_size",),
        )


def _check_zero_stage(run: RunConfig) -> Issues:
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


def _check_split_backward(run: RunConfig) -> Issues:
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
            f"{why}, which reentrant activation checkpointing does not support; write"
            " enable_reentrant: false",
            reads,
        )


def _check_sequence_parallel(run: RunConfig) -> Issues:
    if run.train.sequence_parallel and run.train.tensor_parallel_size == 1:
        yield ConfigIssue(
            ("train", "sequence_parallel"),
            "distributes tokens over the ranks of tensor_parallel_size, which is 1; write"
            " tensor_parallel_size: 2 or more, or sequence_parallel: false",
            ("train.tensor_parallel_size",),
        )


def _check_pipeline_stages(run: RunConfig) -> Issues:
    train = run.train
    options = {
        "pipeline_parallel_virtual_stages": (train.pipeline_parallel_virtual_stages or 1) > 1,
        "pipeline_parallel_split": train.pipeline_parallel_split != "uniform",
    }
    if train.pipeline_parallel_size == 1:
        for name in (name for name, is_set in options.items() if is_set):
            yield ConfigIssue(
                ("train", name),
                "there are no pipeline stages with pipeline_parallel_size: 1; write"
                f" pipeline_parallel_size: 2 or more, or leave {name} out",
                ("train.pipeline_parallel_size",),
            )
    for name in ("pipeline_parallel_input_weight", "pipeline_parallel_output_weight"):
        if train.pipeline_parallel_split != "uniform" and getattr(train, name) != 1:
            yield ConfigIssue(
                ("train", name),
                f"is for a uniform split, and pipeline_parallel_split lists the layers; leave"
                f" {name} out, or write pipeline_parallel_split: uniform",
                ("train.pipeline_parallel_split",),
            )


def _check_deepep(run: RunConfig) -> Issues:
    model, train = run.model, run.train
    if model.ep_dispatch != "deepep":
        return
    size = train.expert_parallel_size
    if size not in DEEPEP_SIZES:
        near = min(DEEPEP_SIZES, key=lambda other: abs(other - size))
        yield ConfigIssue(
            ("model", "ep_dispatch"),
            "deepep needs 2, 4 or 8 ranks on one node, and"
            f" expert_parallel_size is {size}; write train.expert_parallel_size: {near}, or"
            " ep_dispatch: alltoall",
            ("train.expert_parallel_size",),
        )
    if train.computes_in != "bfloat16":
        yield ConfigIssue(
            ("model", "ep_dispatch"),
            f"deepep supports bfloat16 only, and this run computes in {train.computes_in}; write"
            " train.precision: bf16_mixed, or ep_dispatch: alltoall",
            ("train.enable_mixed_precision", "train.precision"),
        )


LAYOUT_RULES = (
    _check_fsdp2_fields,
    _check_gradient_sync,
    _check_reductions,
    _check_zero_stage,
    _check_split_backward,
    _check_sequence_parallel,
    _check_pipeline_stages,
    _check_deepep,
)
