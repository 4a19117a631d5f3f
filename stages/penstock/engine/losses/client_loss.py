"""Passes over micro-batches whose tokens bring inputs of a loss along, and the log-probability of
every token, wherever it was computed.

Gradients are those of the sum of all losses: nothing is divided, and nothing is stepped here. T
tokens of a micro-batch, padding included; N samples in it. Where tokens of a pass have several
targets, up to K of them, what is known of each and its log-probability are [T, K].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from penstock.engine.distributed.context_parallel import ContextParallel
from penstock.engine.distributed.parallel_model import ParallelModel
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.distributed.vocab_parallel import LogProbsOf
from penstock.engine.moe.load_balancing import Routers
from penstock.losses.policy import LossInputs, TokenLoss, sequence_losses, token_losses
from penstock.models.decoder import Reduce
from penstock.rows.collate import MicroBatch

NOWHERE = -1
"""The place of padding."""


@dataclass(frozen=True)
class PolicyLoss:
    """What a pass makes of log-probabilities."""

    name: TokenLoss | Literal["gspo"]
    params: Mapping[str, float]

    def of_tokens(self, logp_T: torch.Tensor, told: LossInputs) -> torch.Tensor | None:
        """Each token's, [T], or each target's, [T, K]; None where tokens have none by
        themselves."""
        if self.name == "gspo":
            return None
        return token_losses(self.name, logp_T, told, self.params)

    def of_sample(self, logp_T: torch.Tensor, told: LossInputs) -> torch.Tensor:
        """That of one whole sample, a scalar."""
        if self.name == "gspo":
            # As in passes, in fp64.
            return sequence_losses(
                logp_T, told, self.params, lambda x_T: x_T.double().sum()[None]
            ).sum()
        return token_losses(self.name, logp_T, told, self.params).sum()


@dataclass(frozen=True)
class LossBatch:
    """A micro-batch, and what is known of each of its tokens; all of the whole micro-batch."""

    batch: MicroBatch
    """Labels, [T] or [T, K], are wherever a log-probability is wanted, also of tokens that count
    nothing."""
    told: LossInputs
    """As the labels."""
    sample_T: torch.Tensor  # noqa: N815 - T names the dimension
    """Which of the samples each token is of, int64; padding is of one more."""
    num_samples: int
    place_T: torch.Tensor  # noqa: N815
    """Where its log-probability is put among those of all tokens, int64; NOWHERE for padding."""


@dataclass(frozen=True)
class PolicyForwardBackward:
    """How a laid-out model computes losses of clients."""

    layout: ParallelModel
    ranks: ProcessInfo
    log_probs: LogProbsOf
    routers: Routers | None = None
    """None where nothing is told of them."""

    def forward_backward(
        self, batches: Sequence[LossBatch], loss: PolicyLoss, num_tokens: int
    ) -> tuple[torch.Tensor, Mapping[str, Any]]:
        """Leave the summed gradients of all ranks' micro-batches in the parameters.

        Every rank has as many micro-batches as every other, and `num_tokens` are those of all of
        them. Returns the log-probabilities of all ranks' tokens by their places, fp32 on every
        rank; and what there is to tell of routers.
        """
        found = self._nothing(batches, num_tokens)
        calls = self._calls(batches, partial(self._learn, found, loss))
        if self.routers:
            calls = self.routers.watching(
                calls,
                [each.batch for each in batches],
                num_tokens,
                self.layout.context,
                self.layout.observe,
            )
        self.layout.forward_backward(calls)
        told = self.routers.conclude(num_tokens) if self.routers else {}
        return self.ranks.total(found), told

    @torch.no_grad()
    def forward(self, batches: Sequence[LossBatch], num_tokens: int) -> torch.Tensor:
        """The same log-probabilities, and no gradients."""
        found = self._nothing(batches, num_tokens)
        self.layout.forward(self._calls(batches, partial(self._look, found)))
        return self.ranks.total(found)

    def _nothing(self, batches: Sequence[LossBatch], num_tokens: int) -> torch.Tensor:
        # Every rank has a batch, be it of padding, and all have as many targets.
        targets = batches[0].batch.labels_T.shape[1:]
        return torch.zeros(num_tokens, *targets, dtype=torch.float32, device=self.ranks.device)

    def _calls(self, batches: Sequence[LossBatch], reduced: Any) -> Any:
        device = self.ranks.device
        here = [_here(each, self.layout.context, device) for each in batches]
        reduces: list[Reduce] = [partial(reduced, mine) for mine in here]
        return [
            self.layout.call(each.batch, reduce, device)
            for each, reduce in zip(batches, reduces, strict=True)
        ]

    def _learn(
        self,
        found: torch.Tensor,
        loss: PolicyLoss,
        mine: LossBatch,
        hidden: torch.Tensor,
        head: nn.Module,
    ) -> torch.Tensor:
        logp_T = self._noted(found, mine, hidden, head)
        losses_T = loss.of_tokens(logp_T, mine.told)
        if losses_T is not None:
            return losses_T.sum()
        # Alike on all ranks that share the samples; each has the gradients of its own tokens.
        return (
            sequence_losses(logp_T, mine.told, loss.params, partial(self._of_samples, mine))
            .sum()
            .float()
        )

    def _look(
        self, found: torch.Tensor, mine: LossBatch, hidden: torch.Tensor, head: nn.Module
    ) -> torch.Tensor:
        self._noted(found, mine, hidden, head)
        return hidden.new_zeros((), dtype=torch.float32)

    def _noted(
        self, found: torch.Tensor, mine: LossBatch, hidden: torch.Tensor, head: nn.Module
    ) -> torch.Tensor:
        logp_T = self.log_probs(hidden, head, mine.batch.labels_T)
        # Ranks along the tensor axis come to the same; one of them tells it.
        if self.layout.mesh.index("tensor") == 0:
            is_told = mine.place_T != NOWHERE
            found[mine.place_T[is_told]] = logp_T.detach()[is_told]
        return logp_T

    def _of_samples(self, mine: LossBatch, x_T: torch.Tensor) -> torch.Tensor:
        # In fp64, so that it does not matter how many ranks share a sample.
        x_T = x_T.double()
        sums = x_T.new_zeros(mine.num_samples + 1).index_add(0, mine.sample_T, x_T)
        return self.layout.context.total(sums[:-1])


def _here(each: LossBatch, context: ContextParallel, device: torch.device) -> LossBatch:
    """This rank's share, on the device. What is not a tensor stays that of the whole."""

    def part(x_T: torch.Tensor) -> torch.Tensor:
        return context.part(x_T).to(device, non_blocking=True)

    mine = context.mine(each.batch)
    told = {field.name: part(getattr(each.told, field.name)) for field in fields(each.told)}
    return LossBatch(
        MicroBatch(**{**vars(mine), "labels_T": mine.labels_T.to(device)}),
        LossInputs(**told),
        part(each.sample_T),
        each.num_samples,
        part(each.place_T),
    )
