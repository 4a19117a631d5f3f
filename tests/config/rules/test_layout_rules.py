"""Settings of the layout that contradict one another are refused with the way out."""

from typing import Any

import pytest

from penstock.config.loading.load import loads
from tests.config.values import refused_and_mended, smallest

ZERO_BUBBLE = {"pipeline_parallel_size": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"}

# The settings, where the fault is told, words of the reason, and the change that mends it.
COMBINATIONS: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    (
        {"train": {"moe_checkpoint_method": "moe_act", "enable_gradient_checkpointing": False}},
        "train.moe_checkpoint_method",
        "nothing is recomputed",
        {"train": {"enable_gradient_checkpointing": True}},
    ),
    (
        {"train": {"moe_checkpoint_method": "moe_act", "recompute_modules": ["self_attn"]}},
        "train.moe_checkpoint_method",
        "write recompute_modules: [self_attn, mlp]",
        {"train": {"recompute_modules": ["self_attn", "mlp"]}},
    ),
    (
        {"train": {"dropout": {"attention": 0.1}, "ulysses_parallel_size": 2}},
        "train.dropout.attention",
        "write train.ulysses_parallel_size: 1",
        {"train": {"ulysses_parallel_size": 1}},
    ),
    (
        {"train": {"comm_bucket_mb": 25}},
        "train.comm_bucket_mb",
        "write data_parallel_mode: ddp",
        {"train": {"data_parallel_mode": "ddp"}},
    ),
    *(
        (
            {"train": {"fsdp_gradient_sync": "micro_batch", **settings}},
            "train.fsdp_gradient_sync",
            "write fsdp_gradient_sync: step",
            {"train": {"fsdp_gradient_sync": "step"}},
        )
        for settings in (
            {"pipeline_parallel_size": 2},
            {"fsdp_reduce_dtype": "bf16"},
            {"precision": "bf16"},
        )
    ),
    (
        {"train": {"tp_reduce_dtype": "fp32"}},
        "train.tp_reduce_dtype",
        "there is no reduction with tensor_parallel_size: 1",
        {"train": {"tensor_parallel_size": 2}},
    ),
    (
        {"model": {"deepep_num_sms": 24}},
        "model.deepep_num_sms",
        "write ep_dispatch: deepep",
        {"model": {"ep_dispatch": "deepep"}, "train": {"expert_parallel_size": 2}},
    ),
    (
        {"model": {"ep_dispatch": "deepep"}, "train": {"expert_parallel_size": 6}},
        "model.ep_dispatch",
        "deepep needs 2, 4 or 8 ranks on one node",
        {"train": {"expert_parallel_size": 4}},
    ),
    (
        {
            "model": {"ep_dispatch": "deepep"},
            "train": {"expert_parallel_size": 2, "enable_mixed_precision": False},
        },
        "model.ep_dispatch",
        "deepep supports bfloat16 only",
        {"train": {"enable_mixed_precision": True}},
    ),
    (
        {"train": {"data_parallel_mode": "ddp", "enable_fsdp_offload": True}},
        "train.enable_fsdp_offload",
        "write data_parallel_mode: fsdp2",
        {"train": {"data_parallel_mode": "fsdp2"}},
    ),
    (
        {"train": {"data_parallel_mode": "none", "cp_fsdp_mode": "ring_only"}},
        "train.cp_fsdp_mode",
        "is ring_only, but data_parallel_mode: none does not",
        {"train": {"cp_fsdp_mode": "all"}},
    ),
    (
        {"train": {"zero_stage": 1, "reshard_after_forward": True}},
        "train.zero_stage",
        "write zero_stage: 3",
        {"train": {"zero_stage": 3}},
    ),
    (
        {"train": {"zero_stage": 3, "enable_full_shard": False}},
        "train.zero_stage",
        "leave enable_full_shard out",
        {"train": {"zero_stage": 2}},
    ),
    (
        {"train": {"enable_full_shard": False, "reshard_after_forward": True}},
        "train.enable_full_shard",
        "write enable_full_shard: true",
        {"train": {"enable_full_shard": True}},
    ),
    (
        {"train": {**ZERO_BUBBLE, "reshard_after_forward": True}},
        "train.reshard_after_forward",
        "from weights that true has freed",
        {"train": {"reshard_after_forward": False}},
    ),
    (
        {"train": {**ZERO_BUBBLE, "zero_stage": 3}},
        "train.zero_stage",
        "write zero_stage: 2",
        {"train": {"zero_stage": 2}},
    ),
    (
        {"train": {**ZERO_BUBBLE, "enable_reentrant": True}},
        "train.enable_reentrant",
        "write enable_reentrant: false",
        {"train": {"pipeline_parallel_schedule": "1F1B"}},
    ),
    (
        {"train": {"sequence_parallel": True}},
        "train.sequence_parallel",
        "write tensor_parallel_size: 2 or more",
        {"train": {"tensor_parallel_size": 2}},
    ),
    (
        {"train": {"pipeline_parallel_split": [0, 2]}},
        "train.pipeline_parallel_split",
        "there are no pipeline stages with",
        {"train": {"pipeline_parallel_size": 2}},
    ),
    (
        {
            "train": {
                "pipeline_parallel_size": 2,
                "pipeline_parallel_split": [0, 2],
                "pipeline_parallel_input_weight": 2,
            }
        },
        "train.pipeline_parallel_input_weight",
        "pipeline_parallel_split lists the layers",
        {"train": {"pipeline_parallel_split": "uniform"}},
    ),
]


@pytest.mark.parametrize(("sections", "where", "reason", "mended"), COMBINATIONS)
def test_a_contradiction_is_refused_and_mended_by_what_is_proposed(
    sections: dict[str, Any], where: str, reason: str, mended: dict[str, Any]
) -> None:
    refused_and_mended(sections, where, reason, mended)


@pytest.mark.parametrize(
    "train",
    [
        # A schedule without a pipeline orders nothing.
        {**ZERO_BUBBLE, "pipeline_parallel_size": 1, "reshard_after_forward": True},
        {**ZERO_BUBBLE, "enable_reentrant": True, "enable_gradient_checkpointing": False},
        # Nothing is gathered, and so nothing is kept.
        {"data_parallel_mode": "ddp", "reshard_after_forward": True, "enable_full_shard": True},
        # Sharded at rest, kept in between.
        {"enable_full_shard": True, "reshard_after_forward": False},
    ],
)
def test_settings_that_agree_are_accepted(train: dict[str, Any]) -> None:
    assert loads(smallest(train=train))
