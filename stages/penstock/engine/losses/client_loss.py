"""Client losses of a training server: policy losses and token log-probs.

Gradients are those of the sum of all losses: nothing is divided, and no optimizer step is taken
here. T tokens of a micro-batch, padding included; N samples in it. If tokens have several targets,
up to K, their loss inputs and log-probs are [T, K].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from penstock.engine.distributed.context_parallel import ContextParallel
from penstock.engine.distributed.parallel_model import ModelInputs, ParallelModel
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.distributed.vocab_parallel import LogProbsFn
from penstock.engine.moe.routers import Routers
from penstock.losses.policy import LossInputs, TokenLoss, sequence_losses, token_losses
from penstock.rows.collate import MicroBatch
from penstock_kernels.to_device import to_device

NO_POSITION = -1


@dataclass(frozen=True)
class PolicyLoss:
    """The loss that a pass computes from log-probs."""

    name: TokenLoss | Literal["gspo"]
    params: Mapping[str, float]

    def of_tokens(self, logp_T: torch.Tensor, loss_inputs: LossInputs) -> torch.Tensor | None:
        """The loss of each token, [T], or target, [T, K]; None for losses over whole sequences."""
        if self.name == "gspo":
            return None
        return token_losses(self.name, logp_T, loss_inputs, self.params)

    def of_sample(self, logp_T: torch.Tensor, loss_inputs: LossInputs) -> torch.Tensor:
        if self.name == "gspo":
            # In fp64, as in passes.
            return sequence_losses(
                logp_T, loss_inputs, self.params, lambda x_T: x_T.double().sum()[None]
            ).sum()
        return token_losses(self.name, logp_T, loss_inputs, self.params).sum()


@dataclass(frozen=True)
class LossBatch:
    """A micro-batch with the loss inputs of its tokens; all of the whole micro-batch."""

    batch: MicroBatch
    """Labels, [T] or [T, K], are set wherever a log-prob is requested, with or without a loss."""
    loss_inputs: LossInputs
    """Shaped like the labels."""
    sample_T: torch.Tensor  # noqa: N815 - T names the dimension
    """The sample of each token, int64; padding belongs to one more."""
    num_samples: int
    position_T: torch.Tensor  # noqa: N815
    """The index of its log-prob among all tokens, int64; NO_POSITION for padding."""


@dataclass(frozen=True)
class PolicyForwardBackward:
    """Computes client losses with a parallelized model."""

    layout: ParallelModel
    ranks: ProcessInfo
    log_probs: LogProbsFn
    routers: Routers | None = None
    """None if router metrics are not logged."""

    def forward_backward(
        self, batches: Sequence[LossBatch], loss: PolicyLoss, num_tokens: int
    ) -> tuple[torch.Tensor, Mapping[str, Any]]:
        """Accumulate the summed gradients of all ranks' micro-batches in the parameters.

        Every rank has the same number of micro-batches, with `num_tokens` tokens in total. Returns
        the log-probs of all ranks' tokens by index, fp32 on every rank, and router metrics.
        """
        log_probs = self._empty_log_probs(batches, num_tokens)
        calls = self._calls(batches, partial(self._train, log_probs, loss))
        if self.routers:
            micro_batches = [loss_batch.batch for loss_batch in batches]
            calls = self.routers.with_observers(self.layout, calls, micro_batches, num_tokens)
        self.layout.forward_backward(calls)
        router_metrics = self.routers.finish_step(num_tokens) if self.routers else {}
        return self.ranks.all_reduce_sum(log_probs), router_metrics

    @torch.no_grad()
    def forward(self, batches: Sequence[LossBatch], num_tokens: int) -> torch.Tensor:
        """The same log-probs without gradients."""
        log_probs = self._empty_log_probs(batches, num_tokens)

        def record(loss_batch: LossBatch, hidden: torch.Tensor, head: nn.Module) -> torch.Tensor:
            self._record_log_probs(log_probs, loss_batch, hidden, head)
            return hidden.new_zeros((), dtype=torch.float32)

        self.layout.forward(self._calls(batches, record))
        return self.ranks.all_reduce_sum(log_probs)

    def _empty_log_probs(self, batches: Sequence[LossBatch], num_tokens: int) -> torch.Tensor:
        # Every rank has a batch, possibly of padding, and all have the same number of targets.
        targets = batches[0].batch.labels_T.shape[1:]
        # Zeros: one rank fills an index, and the sum over ranks has all.
        return torch.zeros(num_tokens, *targets, dtype=torch.float32, device=self.ranks.device)

    def _calls(self, batches: Sequence[LossBatch], reduced: Any) -> list[ModelInputs]:
        context, device = self.layout.context, self.ranks.device
        reduces = [partial(reduced, _to_local(batch, context, device)) for batch in batches]
        return [
            self.layout.build_inputs(loss_batch.batch, reduce, device)
            for loss_batch, reduce in zip(batches, reduces, strict=True)
        ]

    def _train(
        self,
        log_probs: torch.Tensor,
        loss: PolicyLoss,
        loss_batch: LossBatch,
        hidden: torch.Tensor,
        head: nn.Module,
    ) -> torch.Tensor:
        logp_T = self._record_log_probs(log_probs, loss_batch, hidden, head)
        losses_T = loss.of_tokens(logp_T, loss_batch.loss_inputs)
        if losses_T is not None:
            return losses_T.sum()

        def sum_by_sample(x_T: torch.Tensor) -> torch.Tensor:
            # In fp64, so that the number of ranks that share a sample does not matter.
            x_T = x_T.double()
            sums = x_T.new_zeros(loss_batch.num_samples + 1).index_add(0, loss_batch.sample_T, x_T)
            return self.layout.context.all_reduce_sum(sums[:-1])

        # The same on all ranks that share the samples; each has the gradients of its tokens.
        inputs = loss_batch.loss_inputs
        return sequence_losses(logp_T, inputs, loss.params, sum_by_sample).sum().float()

    def _record_log_probs(
        self, log_probs: torch.Tensor, loss_batch: LossBatch, hidden: torch.Tensor, head: nn.Module
    ) -> torch.Tensor:
        logp_T = self.log_probs(hidden, head, loss_batch.batch.labels_T)
        # Ranks along the tensor axis compute the same values; one of them reports them.
        if self.layout.mesh.index("tensor") == 0:
            has_position = loss_batch.position_T != NO_POSITION
            log_probs[loss_batch.position_T[has_position]] = logp_T.detach()[has_position]
        return logp_T


def _to_local(loss_batch: LossBatch, context: ContextParallel, device: torch.device) -> LossBatch:
    """This rank's tokens, on the device; other fields still describe the full micro-batch."""

    def part(x_T: torch.Tensor) -> torch.Tensor:
        return to_device(context.shard_tensor(x_T), device)

    local = context.shard_batch(loss_batch.batch)
    loss_inputs = {
        field.name: part(getattr(loss_batch.loss_inputs, field.name))
        for field in fields(loss_batch.loss_inputs)
    }
    return LossBatch(
        MicroBatch(**{**vars(local), "labels_T": to_device(local.labels_T, device)}),
        LossInputs(**loss_inputs),
        part(loss_batch.sample_T),
        loss_batch.num_samples,
        part(loss_batch.position_T),
    )
