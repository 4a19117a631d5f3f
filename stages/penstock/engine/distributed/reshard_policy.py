"""FSDP2 resharding policy: when gathered weights are freed (`reshard_after_forward`).

The numbers are the stages of ZeRO (Rajbhandari et al. 2020): 3 frees weights after the forward
pass, 2 after the backward pass, 1 after the step. Which one the settings ask for is told by
`TrainConfig.resolved_zero_stage`. No torch: plans use this too.
"""

from typing import Literal

from penstock.config.schema.train import TrainConfig

ReshardAfter = Literal["step", "backward", "nothing"]
"""What gathered weights are kept until: ZeRO stages 1, 2 and 3."""

STAGES: dict[int, ReshardAfter] = {1: "step", 2: "backward", 3: "nothing"}


def reshard_policy(train: TrainConfig) -> ReshardAfter:
    """The policy under fsdp2."""
    return STAGES[train.resolved_zero_stage]
