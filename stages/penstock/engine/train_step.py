"""Train step: gradient accumulation over micro-batches, gradient clipping, one optimizer step.

The loss is the sum of the losses of all trained tokens of the step, over every rank and
micro-batch, each times its loss weight, divided by the sum of those weights: the number of trained
tokens if all weigh 1. In preference training it is the sum over samples divided by the number of
samples. It does not depend on how the step is split into micro-batches and ranks. Router losses are
reported separately.

What is optional, its loss included, is a part (`step_part.py`); `build_step.py` states their order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch

from penstock.core.errors import StageError
from penstock.engine.checkpoint.async_staging import PreUpdateHooks
from penstock.engine.distributed.parallel_model import ModelInputs, ParallelModel, no_loss
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.losses.token_loss import TokenLoss
from penstock.engine.non_finite import locate_non_finite
from penstock.engine.split_by_length import num_sub_batches, split_by_length
from penstock.engine.step_part import StepPart, StepState, TokenCounts
from penstock.models.layers.dropout import DropoutRNG
from penstock.optim.groups import set_lr
from penstock.rows.collate import MicroBatch
from penstock_kernels.to_device import to_device

P = TypeVar("P", bound=StepPart)


@dataclass(frozen=True)
class Prefetch:
    """What the host prepares for the next step while the device computes this one."""

    batches: Sequence[MicroBatch] = ()
    """The micro-batches of the next step; empty at the end of a run."""
    maxima: tuple[int, ...] = ()
    """Numbers of this rank, to be max-reduced over ranks; below 2^53."""


@dataclass(frozen=True)
class StepResult:
    """The outcome of one step; the same on every rank, except `local_loss`."""

    loss: float | None
    """None without a trained token."""
    grad_norm: float
    tokens: int
    trained_tokens: int
    metrics: Mapping[str, Any]
    """The metrics of the parts, by name. Auxiliary losses among them are not part of `loss`."""
    local_loss: torch.Tensor
    """This rank's part of `loss`, a scalar."""
    next_counts: TokenCounts | None = None
    """Tokens of the prefetched micro-batches; None without any."""
    maxima: tuple[int, ...] = ()
    """`Prefetch.maxima` over all ranks."""
    changed_weights: float | None = None
    """The share of the sampled weights with a gradient that the update changed; None if it was not
    measured."""


@dataclass(frozen=True)
class TrainStep:
    """A parallelized model with its optimizer: everything a step needs."""

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    ranks: ProcessInfo
    parts: Sequence[StepPart]
    """In the order in which each moment calls them."""
    gradient_norm: Callable[[], torch.Tensor]
    """The norm of all gradients, fp32 scalar. Collective."""
    eval_loss: TokenLoss
    """Locates rows with a non-finite loss."""
    pre_update_hooks: PreUpdateHooks
    """Hooks called before weights or optimizer states are modified."""
    is_fused: bool = False
    """Whether the optimizer steps in the backward pass."""
    splits_by_length: bool = False
    """Whether the model computes padded batches, for which micro-batches are split."""
    dropout_seed: int | None = None
    """Seed of dropout and noise; None when the model has neither."""

    def part(self, kind: type[P]) -> P | None:
        """The part of this class; None if the run has none."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def step(
        self,
        batches: Sequence[MicroBatch],
        lr: float,
        number: int,
        references: Sequence[torch.Tensor] = (),
        *,
        counts: TokenCounts | None = None,
        prefetch: Callable[[], Prefetch] = Prefetch,
        measures_changes: bool = False,
    ) -> StepResult:
        """Run forward, backward and update of one step.

        The host waits for the device once, between the backward pass and the update: for the loss,
        the gradient norm and what `prefetch` returned, which is called while the device computes.

        Args:
            batches: this rank's micro-batches.
            lr: learning rate.
            number: the step number, from 0; it seeds dropout and decides whether adapters are
                merged.
            references: reference log-probs of each micro-batch's completions, [D, A], in preference
                training with a reference model.
            counts: `next_counts` of the step before. Without them the counts of this step are read
                from the device first.
            prefetch: prepares the next step.
            measures_changes: whether to measure `changed_weights`, if the optimizer steps after the
                backward pass.

        Raises:
            StageError: the gradients are not finite; if a smaller loss scale may help, the update
                is skipped instead.
        """
        if counts is None:
            sums = to_device(self._local_counts(batches), self.ranks.device)
            tokens, trained, loss_weight = self.ranks.all_reduce_sum(sums).tolist()
            sub_batches = self._local_sub_batches(batches)
            if sub_batches:
                sub_batches = tuple(self.ranks.max_over_ranks(*sub_batches))
            counts = self._counts_per_replica(tokens, trained, loss_weight, sub_batches)
        step = self._start(batches, number, references, counts, measures_changes=measures_changes)
        for part in self.parts:
            part.before_forward(step)
        self.ranks.heartbeat.set_phase("forward")
        # Before the passes: a fused optimizer steps during them.
        set_lr(self.optimizer, lr)
        local_loss = self.model.forward_backward(step.calls) / step.scale
        upcoming = prefetch()
        self.ranks.heartbeat.set_phase("update")
        local_totals = [part.after_backward(step) for part in self.parts]
        norm = self.gradient_norm()
        loss, step.grad_norm, totals, next_counts, maxima = self._read(
            local_loss, norm, local_totals, upcoming
        )
        if not step.is_finite and not any(part.skips_update(step) for part in self.parts):
            raise self._non_finite_error(batches, step)
        # Call the hooks on skipped updates too: merging and router biases also modify weights.
        self.pre_update_hooks.run()
        if step.is_finite and not self.is_fused:
            for part in self.parts:
                part.before_update(step)
            self.optimizer.step()
            for part in self.parts:
                part.after_update(step)
        # Not `optimizer.zero_grad`, which under CPU offload knows the host's copies alone.
        for local_param in self.model.trainable:
            local_param.parameter.grad = None
        metrics: dict[str, Any] = {}
        for part, part_totals in zip(self.parts, totals, strict=True):
            metrics.update(part.finish(step, part_totals))
        return StepResult(
            loss if step.has_loss else None,
            # Report 0 on overflow: the norm of overflowed gradients is meaningless.
            step.grad_norm if step.is_finite else 0.0,
            counts.tokens,
            counts.trained,
            metrics,
            local_loss,
            next_counts,
            maxima,
            step.changed_weights,
        )

    def _start(
        self,
        batches: Sequence[MicroBatch],
        number: int,
        references: Sequence[torch.Tensor],
        counts: TokenCounts,
        *,
        measures_changes: bool,
    ) -> StepState:
        if counts.sub_batches:
            # All ranks run the same number of sub-batches.
            pairs = zip(batches, counts.sub_batches, strict=True)
            batches = [sub for batch, count in pairs for sub, _ in split_by_length(batch, count)]
        calls: list[ModelInputs] = []
        device, rng = self.ranks.device, None
        for batch in batches:
            if self.dropout_seed is not None:
                places_T = self.model.context.shard_tensor(batch.places())
                rng = DropoutRNG(self.dropout_seed, number, to_device(places_T, device))
            calls.append(self.model.build_inputs(batch, no_loss, device, rng))
        return StepState(
            self.model,
            number,
            batches,
            counts,
            calls,
            references,
            measures_changes=measures_changes,
            has_loss=counts.trained > 0,
        )

    def _read(
        self,
        local_loss: torch.Tensor,
        norm: torch.Tensor,
        local_totals: Sequence[torch.Tensor | None],
        upcoming: Prefetch,
    ) -> tuple[float, float, list[list[float]], TokenCounts | None, tuple[int, ...]]:
        """The loss and the totals over all ranks, the norm, the next step's counts and the maxima:
        one sync."""
        device = self.ranks.device
        local_counts = to_device(self._local_counts(upcoming.batches), device)
        sent = [total for total in local_totals if total is not None]
        sums = torch.cat([local_loss.double().reshape(1), local_counts, *sent])
        pieces = [self.ranks.all_reduce_sum(sums), norm.double().reshape(1)]
        local_sub_batches = self._local_sub_batches(upcoming.batches)
        if maxima := (*upcoming.maxima, *local_sub_batches):
            maxima_M = to_device(torch.tensor(maxima, dtype=torch.int64), device)
            pieces.append(self.ranks.all_reduce_max(maxima_M).double())
        sizes = [0 if total is None else len(total) for total in local_totals]
        sizes = [1, 3, *sizes, 1, len(upcoming.maxima), len(local_sub_batches)]
        # One copy to the host is the only sync. In fp64, where counts below 2^53 are exact.
        numbers = iter(torch.cat(pieces).tolist())
        values = [list(islice(numbers, size)) for size in sizes]
        [loss], [tokens, trained, loss_weight], *totals, [norm_value], highest, sub_batches = values
        next_counts = None
        if upcoming.batches:
            next_counts = self._counts_per_replica(
                tokens, trained, loss_weight, tuple(map(int, sub_batches))
            )
        return loss, norm_value, totals, next_counts, tuple(map(int, highest))

    def _non_finite_error(self, batches: Sequence[MicroBatch], step: StepState) -> StageError:
        self.ranks.heartbeat.set_phase("locating non-finite gradients")

        def loss_of(batch: MicroBatch) -> float:
            output_fn = self.eval_loss.output_fn(batch, 1)
            call = self.model.build_inputs(batch, output_fn, self.ranks.device)
            return self.model.forward([call]).item()

        with torch.no_grad():
            origin = locate_non_finite(batches, loss_of, self.model.trainable, self.ranks)
        return StageError(
            f"the gradient norm of step {step.number + 1} is {step.grad_norm}; the weights were "
            f"left as they were.\n  {origin}\n"
            "  Look at those rows in the packed data, or lower train.lr; the last checkpoint is "
            "intact."
        )

    def _counts_per_replica(
        self, tokens: float, trained: float, loss_weight: float, sub_batches: tuple[int, ...]
    ) -> TokenCounts:
        # Every rank of a replica counts the same batch, so the sums over all ranks are divided.
        ranks = self.model.model_parallel_size
        return TokenCounts(
            round(tokens) // ranks, round(trained) // ranks, loss_weight / ranks, sub_batches
        )

    def _local_sub_batches(self, batches: Sequence[MicroBatch]) -> tuple[int, ...]:
        return tuple(map(num_sub_batches, batches)) if self.splits_by_length else ()

    @staticmethod
    def _local_counts(batches: Sequence[MicroBatch]) -> torch.Tensor:
        """This rank's tokens, trained tokens and loss weight, fp64 [3] on the host."""
        counts = [(b.num_tokens, b.num_trained, b.loss_weight) for b in batches]
        return torch.tensor(counts, dtype=torch.float64).view(-1, 3).sum(0)
