"""Sequence log-probs: the summed log-prob of each completion, under any layout.

D samples of a micro-batch, A completions of each, T tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from penstock.engine.distributed.parallel_model import ModelInputs, ParallelModel
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.distributed.vocab_parallel import LogProbsFn
from penstock.losses.labels import Labels
from penstock.rows.collate import MicroBatch
from penstock.rows.schema import IGNORED
from penstock.rows.shared_prefix import PER_SAMPLE
from penstock_kernels.to_device import to_device

CompletionLogProbsFn = Callable[[torch.Tensor, nn.Module], torch.Tensor]
"""Function from final hidden states and head to the log-prob of each completion, fp64 [D, A]: the
sum over its tokens, on all ranks that share them. With prompts [D, A + 1]: the last column has
theirs.
"""


@dataclass(frozen=True)
class SequenceLogProbs:
    """Computes sequence log-probs with a parallelized model."""

    layout: ParallelModel
    ranks: ProcessInfo
    log_probs: LogProbsFn
    with_prompts: bool = False

    @property
    def is_loss_rank(self) -> bool:
        ends = any(part.lm_head is not None for part in self.layout.parts)
        return ends and self.layout.is_loss_rank

    def reducer(self, batch: MicroBatch) -> CompletionLogProbsFn:
        """The function that reduces a micro-batch. Communicates between context-parallel ranks."""
        context, device = self.layout.context, self.ranks.device
        count, samples = num_completions(batch), num_completions(batch) // PER_SAMPLE
        labels_T, into_T = batch.labels_T, batch.branch_T()
        # Shared tokens and padding have no labels; they go into a sum that is dropped.
        into_T = into_T.masked_fill(into_T < 0, count + samples)
        if self.with_prompts:
            prompt_T, sample_T = batch.prompt_targets()
            labels_T = torch.where(sample_T >= 0, prompt_T, labels_T)
            into_T = torch.where(sample_T >= 0, count + sample_T, into_T)
        labels = Labels.from_host(context.shard_tensor(labels_T), device)
        into_T = to_device(context.shard_tensor(into_T), device)

        def sums(hidden: torch.Tensor, head: nn.Module) -> torch.Tensor:
            # In fp64, so that the number of ranks that share a completion does not matter.
            log_probs_T = self.log_probs(hidden, head, labels).double()
            partial_sums = log_probs_T.new_zeros(count + samples + 1).index_add(
                0, into_T, log_probs_T
            )
            totals = context.all_reduce_sum(partial_sums[:-1])
            answers_DA = totals[:count].view(-1, PER_SAMPLE)
            if not self.with_prompts:
                return answers_DA
            return torch.cat([answers_DA, totals[count:, None]], dim=1)

        return sums

    @torch.no_grad()
    def gather(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """The log-probs of each micro-batch's completions, shaped as by `CompletionLogProbsFn`, on
        the one rank of a replica that reports them; zeros on the others.
        """
        device, calls, log_probs = self.ranks.device, list[ModelInputs](), list[torch.Tensor]()

        def record(
            into_DA: torch.Tensor, sums: CompletionLogProbsFn, hidden: torch.Tensor, head: nn.Module
        ) -> torch.Tensor:
            log_probs_DA = sums(hidden, head)
            if self.layout.is_loss_rank:
                into_DA.copy_(log_probs_DA)
            return hidden.new_zeros((), dtype=torch.float32)

        for batch in batches:
            shape = num_completions(batch) // PER_SAMPLE, PER_SAMPLE + self.with_prompts
            log_probs.append(torch.zeros(shape, dtype=torch.float64, device=device))
            output_fn = partial(record, log_probs[-1], self.reducer(batch))
            calls.append(self.layout.build_inputs(batch, output_fn, device))
        self.layout.forward(calls)
        return log_probs


def num_completions(batch: MicroBatch) -> int:
    """The number of completions in a preference micro-batch; 0 for one of only padding."""
    return len(batch.branching.branches) if batch.branching else 0


def num_tokens(batch: MicroBatch) -> torch.Tensor:
    """Trained tokens of each completion, int64 [D, A]."""
    branch_T = batch.branch_T()
    trained_S = branch_T[(batch.labels_T != IGNORED) & (branch_T >= 0)]
    return torch.bincount(trained_S, minlength=num_completions(batch)).view(-1, PER_SAMPLE)


def num_prompt_tokens(batch: MicroBatch) -> torch.Tensor:
    """Tokens of each sample's prompt except the first, int64 [D]."""
    _, sample_T = batch.prompt_targets()
    return torch.bincount(sample_T[sample_T >= 0], minlength=num_completions(batch) // PER_SAMPLE)
