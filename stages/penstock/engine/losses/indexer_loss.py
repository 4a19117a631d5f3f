"""The loss that trains the indexers of sparse attention, in a step.

The divergences of all layers (`indexer_loss` of the kernels), summed over the tokens of the step,
times the coefficient, divided by the tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from penstock.config.schema.train import TrainConfig
from penstock.engine.distributed.parallel_model import ModelInputs
from penstock.models.causal_lm import CausalLM
from penstock.models.decoder import Decoder
from penstock.models.decoder_config import DecoderConfig
from penstock.models.layers.indexer import LOSS, Indexer, IndexerLoss
from penstock.rows.collate import MicroBatch


@dataclass(frozen=True)
class IndexerLosses:
    """The loss of a run."""

    coefficient: float
    num_layers: int

    def with_losses(
        self,
        calls: Sequence[ModelInputs],
        batches: Sequence[MicroBatch],
        tokens: int,
        scale: float,
    ) -> tuple[list[ModelInputs], list[IndexerLoss]]:
        """The calls of a step of `tokens` tokens with their losses, multiplied by `scale`, like the
        loss; and these losses, which the passes fill."""
        factor = self.coefficient * scale / max(1, tokens)
        losses = [IndexerLoss(factor, batch.num_tokens) for batch in batches]
        found: list[ModelInputs] = []
        for call, loss in zip(calls, losses, strict=True):
            kept = {**call.segments.kept, LOSS: loss}
            found.append(replace(call, segments=replace(call.segments, kept=kept)))
        return found, losses

    def total(self, losses: Sequence[IndexerLoss], device: torch.device) -> torch.Tensor:
        """This rank's part of the sum over tokens, mean over layers; fp64 [1]."""
        sums = [total.double() for loss in losses for total in loss.sums.values()]
        total = torch.zeros((), dtype=torch.float64, device=device)
        return sum(sums, total)[None] / self.num_layers


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
    for indexer in _indexers(model):
        indexer.requires_grad_(True)
        indexer.is_warmup = train.indexer_warmup


def _indexers(model: CausalLM) -> Iterator[Indexer]:
    return (module for module in model.modules() if isinstance(module, Indexer))
