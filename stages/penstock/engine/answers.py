"""The log-probabilities of whole answers, wherever their tokens lie.

D samples of a micro-batch, A answers of each, T tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from penstock.engine.parallel.layout import Layout
from penstock.engine.parallel.vocabulary import LogProbsOf
from penstock.engine.ranks import Ranks
from penstock.rows.branching import PER_SAMPLE
from penstock.rows.collate import MicroBatch
from penstock.rows.schema import IGNORED

SumsOf = Callable[[torch.Tensor, nn.Module], torch.Tensor]
"""Final hidden states and the head to the log-probability of each answer, fp64 [D, A]: the sum over
its tokens, on all ranks that share them."""


@dataclass(frozen=True)
class AnswerSums:
    """What a laid-out model makes of answers."""

    layout: Layout
    ranks: Ranks
    log_probs: LogProbsOf

    @property
    def tells(self) -> bool:
        """Whether this rank is the one of its replica that tells what is found."""
        ends = any(part.lm_head is not None for part in self.layout.parts)
        return ends and self.layout.tells

    def of(self, batch: MicroBatch) -> SumsOf:
        """What to reduce a micro-batch to. Ranks that share its rows meet there."""
        context, device = self.layout.context, self.ranks.device
        count = num_answers(batch)
        labels_T = context.part(batch.labels_T).to(device, non_blocking=True)
        branch_T = context.part(batch.branch_T()).to(device, non_blocking=True)
        # What is shared, and padding, have no labels; theirs is a sum that nobody reads.
        into_T = branch_T.masked_fill(branch_T < 0, count)

        def sums(hidden: torch.Tensor, head: nn.Module) -> torch.Tensor:
            # In fp64, so that it does not matter how many ranks share an answer.
            log_probs_T = self.log_probs(hidden, head, labels_T).double()
            own = log_probs_T.new_zeros(count + 1).index_add(0, into_T, log_probs_T)
            return context.total(own[:count]).view(-1, PER_SAMPLE)

        return sums

    @torch.no_grad()
    def told(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """The log-probabilities of each micro-batch's answers, fp64 [D, A], on the one rank of a
        replica that tells them, and zeros on the others: the sum over all ranks has them all."""
        found = [self._zeros(batch) for batch in batches]
        self.layout.forward(
            [
                self.layout.call(
                    batch, partial(self._keep, into, self.of(batch)), self.ranks.device
                )
                for batch, into in zip(batches, found, strict=True)
            ]
        )
        return found

    def _zeros(self, batch: MicroBatch) -> torch.Tensor:
        zeros = torch.zeros(num_answers(batch), dtype=torch.float64, device=self.ranks.device)
        return zeros.view(-1, PER_SAMPLE)

    def _keep(
        self, into_DA: torch.Tensor, sums: SumsOf, hidden: torch.Tensor, head: nn.Module
    ) -> torch.Tensor:
        found_DA = sums(hidden, head)
        if self.layout.tells:
            into_DA.copy_(found_DA)
        return hidden.new_zeros((), dtype=torch.float32)


def num_answers(batch: MicroBatch) -> int:
    """How many answers a micro-batch of preferences holds; one of nothing but padding has none."""
    return len(batch.branching.branches) if batch.branching else 0


def num_tokens(batch: MicroBatch) -> torch.Tensor:
    """Trained tokens of each answer, int64 [D, A]."""
    branch_T = batch.branch_T()
    trained_S = branch_T[(batch.labels_T != IGNORED) & (branch_T >= 0)]
    return torch.bincount(trained_S, minlength=num_answers(batch)).view(-1, PER_SAMPLE)
