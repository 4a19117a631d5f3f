"""The loss that trains the indexers of sparse attention, in a step.

The divergences of all layers (`indexer_loss` of the kernels), summed over the tokens of the step,
times the coefficient, divided by the tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from penstock.config.schema.train import TrainConfig
from penstock.engine.step_part import StepPart, StepState
from penstock.models.decoder import Decoder
from penstock.models.decoder_config import DecoderConfig
from penstock.models.layers.indexer import LOSS, Indexer, IndexerLoss


@dataclass
class IndexerLosses(StepPart):
    """The loss of a run."""

    coefficient: float
    num_layers: int
    _losses: list[IndexerLoss] = field(default_factory=list[IndexerLoss], init=False, repr=False)
    """One for each micro-batch of the step, which its passes fill."""

    def before_forward(self, step: StepState) -> None:
        factor = self.coefficient * step.scale / max(1, step.counts.tokens)
        self._losses = [IndexerLoss(factor, batch.num_tokens) for batch in step.batches]
        for number, loss in enumerate(self._losses):
            call = step.calls[number]
            segments = replace(call.segments, memo={**call.segments.memo, LOSS: loss})
            step.calls[number] = replace(call, segments=segments)

    def after_backward(self, step: StepState) -> torch.Tensor:
        """This rank's part of the sum over tokens, mean over layers; fp64 [1]."""
        sums = [total.double() for loss in self._losses for total in loss.sums.values()]
        device = step.calls[0].input_ids_T.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        return sum(sums, total)[None] / self.num_layers

    def finish(self, step: StepState, totals: Sequence[float]) -> Mapping[str, Any]:
        self._losses = []
        return {"indexer_loss": totals[0] / max(1, step.counts.tokens)}


def build_indexer_losses(train: TrainConfig, config: DecoderConfig) -> IndexerLosses | None:
    """The loss of a run; None without one."""
    if not train.indexer_loss_coef:
        return None
    return IndexerLosses(train.indexer_loss_coef, config.num_layers)


def describe_indexers(train: TrainConfig, config: DecoderConfig) -> str | None:
    """What becomes of them, in one line; None without any."""
    if config.indexer is None:
        return None
    if train.indexer_warmup:
        return "model: dense warm-up: tokens attend to all earlier ones; only indexers are trained"
    trained = "trained by a loss of their own" if train.indexer_loss_coef else "frozen"
    return (
        f"model: indexers are {trained}; they select {config.indexer.top_k} tokens for each token "
        "of longer documents (index_topk)"
    )


def set_trainable_indexers(train: TrainConfig, model: Decoder) -> None:
    """Let the indexers be trained, and nothing else in the warm-up."""
    if not train.indexer_loss_coef:
        return
    if train.indexer_warmup:
        model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, Indexer):
            module.requires_grad_(True)
            module.is_warmup = train.indexer_warmup
