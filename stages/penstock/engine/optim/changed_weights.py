"""The share of weights that an update changes: weights in bfloat16 are too coarse for some."""

from collections.abc import Sequence

import torch

from penstock.config.schema.memory import STOCHASTIC
from penstock.config.schema.train import TrainConfig
from penstock.engine.distributed.param_shards import LocalParam, local
from penstock.engine.distributed.ranks import ProcessInfo

SAMPLED_WEIGHTS = 4096
"""Weights of each parameter that are compared, at equal distances."""

FEW_CHANGED = 0.5
"""A smaller share of changed weights at the peak learning rate is warned about."""


class ChangedWeights:
    """Some of this rank's weights before an update, those with a gradient."""

    @torch.no_grad()
    def __init__(self, params: Sequence[LocalParam]) -> None:
        self._before: list[tuple[LocalParam, torch.Tensor, torch.Tensor]] = []
        for param in params:
            if param.parameter.grad is not None:
                with_gradient = _sample(param.parameter.grad) != 0
                self._before.append((param, _sample(param.parameter).clone(), with_gradient))

    @torch.no_grad()
    def share(self, ranks: ProcessInfo) -> float | None:
        """The share of them that has changed since; None if none has a gradient. Collective."""
        counts = torch.zeros(2, dtype=torch.float64, device=ranks.device)
        for param, before, with_gradient in self._before:
            changed = (_sample(param.parameter) != before) & with_gradient
            counts += torch.stack([changed.sum(), with_gradient.sum()]).to(counts)
        changed, compared = ranks.all_reduce_sum(counts).tolist()
        return changed / compared if compared else None


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
