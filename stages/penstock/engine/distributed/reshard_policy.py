"""FSDP2 resharding policy: when gathered weights are freed (`reshard_after_forward`).

The numbers are the stages of ZeRO (Rajbhandari et al. 2020): 3 frees weights after the forward
pass, 2 after the backward pass, 1 after the step. That the settings agree is checked when the
config is read. No torch: plans use this too.
"""

from typing import Literal

from penstock.config.schema.train import TrainConfig

ReshardAfter = Literal["step", "backward", "nothing"]
"""What gathered weights are kept until: ZeRO stages 1, 2 and 3."""

STAGES: dict[int, ReshardAfter] = {1: "step", 2: "backward", 3: "nothing"}


def reshard_policy(train: TrainConfig) -> ReshardAfter:
    """The policy under fsdp2."""
    if train.zero_stage is not None:
        return STAGES[train.zero_stage]
    if train.reshard_after_forward is not None:
        return "nothing" if train.reshard_after_forward else "backward"
    # A pipeline runs forward passes of several micro-batches before a backward pass: freed weights
    # would be gathered once for each.
    if not train.enable_full_shard or train.pipeline_parallel_size > 1:
        return "backward"
    return "nothing"
