"""The share of weights that an update changes: weights in bfloat16 are too coarse for some."""

from collections.abc import Sequence

import torch

from penstock.config.schema.memory import STOCHASTIC
from penstock.config.schema.train import TrainConfig
from penstock.engine.distributed.param_shards import LocalParam, local
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.step_part import StepPart, StepState

# Weights of each parameter that are compared, at equal distances.
SAMPLED_WEIGHTS = 4096

# A smaller share of changed weights at the peak learning rate is warned about.
FEW_CHANGED = 0.5


class ChangedWeights(StepPart):
    """Compares some of this rank's weights before and after an update, those with a gradient."""

    def __init__(self, params: Sequence[LocalParam], ranks: ProcessInfo) -> None:
        self._params, self._ranks = params, ranks
        self._before: list[tuple[LocalParam, torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def before_update(self, step: StepState) -> None:
        if step.measures_changes:
            for param in self._params:
                if param.parameter.grad is not None:
                    with_gradient = _sample(param.parameter.grad) != 0
                    # A copy: the sample is a view of weights that the optimizer changes in place.
                    self._before.append((param, _sample(param.parameter).clone(), with_gradient))

    @torch.no_grad()
    def after_update(self, step: StepState) -> None:
        """Set `step.changed_weights`, unless none has a gradient on any rank."""
        if not step.measures_changes:
            return
        counts = torch.zeros(2, dtype=torch.float64, device=self._ranks.device)
        for param, before, with_gradient in self._before:
            changed = (_sample(param.parameter) != before) & with_gradient
            counts += torch.stack([changed.sum(), with_gradient.sum()]).to(counts)
        self._before = []
        changed, compared = self._ranks.all_reduce_sum(counts).tolist()
        step.changed_weights = changed / compared if compared else None


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = local(tensor.detach()).reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLED_WEIGHTS)]


def rounding_warning(train: TrainConfig, lr: float, share: float) -> str:
    """Warning about an update at this learning rate that changed this share of the weights."""
    rounding = "stochastic_rounding: true, or train." if train.optimizer in STOCHASTIC else ""
    return (
        f"an update at learning rate {lr:g} changed {share:.1%} of the weights that have a "
        "gradient: bfloat16 rounds the others back to what they were; write train."
        f"{rounding}precision: bf16_mixed"
    )
