"""Train step: gradient accumulation over micro-batches, gradient clipping, one optimizer step.

The loss is the sum of the losses of all trained tokens of the step, over every rank and
micro-batch, each times its loss weight, divided by the sum of those weights: the number of trained
tokens if all weigh 1. In preference training it is the sum over
samples divided by the number of samples. It does not depend on how the step is split into
micro-batches and ranks. Router losses are reported separately.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from penstock.core.errors import StageError
from penstock.engine.checkpoint.async_staging import PreUpdateHooks
from penstock.engine.distributed.parallel_model import ModelInputs, ParallelModel
from penstock.engine.distributed.param_shards import LocalParam
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.distributed.vocab_parallel import SumLossFn
from penstock.engine.losses.indexer_loss import IndexerLosses
from penstock.engine.losses.multi_token_prediction import MTPLoss
from penstock.engine.losses.preference import Preferences, PreferenceStep
from penstock.engine.moe.load_balancing import Routers
from penstock.engine.non_finite import locate_non_finite
from penstock.engine.optim.changed_weights import ChangedWeights
from penstock.engine.optim.clip_grad import gradient_norm, scale_gradients
from penstock.engine.optim.cpu_offload import CPUOffloadedParams
from penstock.engine.optim.grad_scaler import GradScaler
from penstock.engine.optim.norm_metrics import Norms
from penstock.engine.optim.optimizer_in_backward import OptimizerInBackward
from penstock.engine.optim.qk_clip import QKClip
from penstock.engine.peft.relora import ReLoRA
from penstock.engine.split_by_length import num_parts, split_by_length
from penstock.models.decoder import OutputFn
from penstock.models.layers.dropout import DropoutRNG
from penstock.models.layers.indexer import IndexerLoss
from penstock.optim.groups import set_lr
from penstock.rows.collate import MicroBatch
from penstock_kernels.to_device import to_device


@dataclass(frozen=True)
class TokenCounts:
    """Tokens and trained tokens of a step, over all replicas."""

    tokens: int
    trained: int
    loss_weight: float
    """Sum of the loss weights of the trained tokens."""
    parts: tuple[int, ...] = ()
    """The most parts that a rank needs of each micro-batch; none where they are not split."""

    @property
    def divisor(self) -> float:
        """What summed losses are divided by; 1 without a trained token."""
        return self.loss_weight or 1.0


@dataclass(frozen=True)
class Prefetch:
    """What the host prepares for the next step while the device computes this one."""

    batches: Sequence[MicroBatch] = ()
    """The micro-batches of the next step; empty at the end of a run."""
    maxima: tuple[int, ...] = ()
    """Numbers of this rank, to be max-reduced over ranks; below 2^53."""


@dataclass(frozen=True)
class StepResult:
    """The metrics of one step; the same on every rank."""

    loss: float | None
    """None without a trained token: the step has no loss."""
    grad_norm: float
    tokens: int
    trained_tokens: int
    router_metrics: Mapping[str, Any]
    """Router metrics by name: auxiliary losses, which are not part of `loss`, and load statistics.
    """
    norm_metrics: Mapping[str, Any]
    """Norm metrics other than `grad_norm`, by name."""
    loss_scale_metrics: Mapping[str, Any]
    """Loss-scale metrics, by name."""
    preference_metrics: Mapping[str, Any]
    """Preference metrics, by name."""
    qk_clip_metrics: Mapping[str, Any]
    """The largest attention logit and the number of clipped heads, by name."""
    local_loss: torch.Tensor
    """This rank's part of `loss`, a scalar; the only field that differs between ranks."""
    next_counts: TokenCounts | None = None
    """Tokens of the prefetched micro-batches; None without any."""
    maxima: tuple[int, ...] = ()
    """`Prefetch.maxima` over all ranks."""
    further_losses: Mapping[str, float] = field(default_factory=dict[str, float])
    """The losses of multi-token prediction and of indexers, which are not part of `loss`, by name.
    """
    changed_weights: float | None = None
    """The share of the sampled weights with a gradient that the update changed; None if it was not
    measured."""


@dataclass(frozen=True)
class TrainStep:
    """A parallelized model with its optimizer: everything a step needs."""

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    ranks: ProcessInfo
    loss_fn: SumLossFn
    eval_loss_fn: SumLossFn
    """The losses used for validation."""
    max_grad_norm: float
    splits_by_length: bool = False
    """Whether the model computes padded batches, for which micro-batches are split."""
    dropout_seed: int | None = None
    """Seed of dropout and noise; None when the model has neither."""
    preferences: Preferences | None = None
    """None in training on a per-token loss."""
    routers: Routers | None = None
    """None when a step does nothing with routers."""
    relora: ReLoRA | None = None
    """None when adapters are not merged into the weights."""
    mtp: MTPLoss | None = None
    """None without layers that predict further tokens."""
    indexers: IndexerLosses | None = None
    """None when there are no indexers, or they are frozen."""
    norms: Norms | None = None
    """None when only the total gradient norm is logged."""
    grad_scaler: GradScaler | None = None
    """None without loss scaling."""
    optimizer_in_backward: OptimizerInBackward | None = None
    """Steps the optimizer in the backward pass; None when it steps afterwards."""
    qk_clip: QKClip | None = None
    """None when attention logits are not bounded."""
    cpu_offload: CPUOffloadedParams | None = None
    """CPU copies of the parameters that the optimizer steps; None when it steps the parameters."""
    pre_update_hooks: PreUpdateHooks = field(default_factory=PreUpdateHooks)
    """Hooks called before weights or optimizer states are modified."""

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
        counts = counts or self._read_counts(batches)
        tokens, trained = counts.tokens, counts.trained
        whole, batches = batches, self._split(batches, counts)
        scale = self.grad_scaler.scale if self.grad_scaler else 1.0
        preference_step = None
        if self.preferences:
            preference_step = self.preferences.start_step(batches, references, scale)
        calls = self._build_calls(batches, number, counts.divisor / scale, preference_step)
        totals: list[torch.Tensor] = []
        if preference_step:
            totals.append(preference_step.metric_totals.flatten())
        if self.mtp:
            totals.append(torch.zeros(1, dtype=torch.float64, device=self.ranks.device))
            calls = self.mtp.with_further_tokens(calls, batches, counts.divisor, scale, totals[-1])
        indexer_losses: Sequence[IndexerLoss] = ()
        if self.indexers:
            calls, indexer_losses = self.indexers.with_losses(calls, batches, tokens, scale)
        self.ranks.heartbeat.set_phase("forward")
        if self.routers:
            layout = self.model
            calls = self.routers.with_observers(
                calls, batches, tokens, layout.context, layout.forward_for_observers, scale=scale
            )
        set_lr(self.optimizer, lr)
        mine = self.model.forward_backward(calls) / scale
        following = prefetch()
        self.ranks.heartbeat.set_phase("update")
        trainable = self.model.trainable
        if self.grad_scaler:
            self.grad_scaler.unscale(trainable)
        norms = self.norms.of_gradients() if self.norms and not self.optimizer_in_backward else None
        norm = norms.total if norms else self._gradient_norm(trainable)
        logits = self.qk_clip.reduce() if self.qk_clip else None
        if self.indexers:
            totals.append(self.indexers.total(indexer_losses, self.ranks.device))
        loss, norm_value, next_counts, maxima, totals_read, logits_read = self._read(
            mine, norm, following, totals, logits
        )
        indexer_total = totals_read.pop()[0] if self.indexers else 0.0
        mtp_loss = totals_read.pop()[0] if self.mtp else 0.0
        is_finite = math.isfinite(norm_value)
        if not is_finite and not (self.grad_scaler and self.grad_scaler.on_overflow()):
            raise self._non_finite_error(whole, norm, number)
        # Call the hooks on skipped updates too: merging and router biases also modify weights.
        self.pre_update_hooks.run()
        changed_weights = (
            self._update(trainable, norm_value, measures_changes=measures_changes)
            if is_finite and not self.optimizer_in_backward
            else None
        )
        for local_param in trainable:
            local_param.parameter.grad = None
        if self.relora and self.relora.is_due(number + 1):
            self.ranks.heartbeat.set_phase("merging adapters")
            self.relora.merge(number + 1)
        router_metrics = self.routers.finish_step(tokens) if self.routers else {}
        of_norms = self.norms.metrics(norms) if self.norms and norms else {}
        of_scaling = {"loss_scale": scale, "skipped": not is_finite} if self.grad_scaler else {}
        return StepResult(
            loss if trained or preference_step else None,
            # Report 0 on overflow: the norm of overflowed gradients is meaningless.
            norm_value if is_finite else 0.0,
            tokens,
            trained,
            router_metrics,
            of_norms if is_finite else {},
            of_scaling,
            preference_step.metrics(totals_read.pop()) if preference_step else {},
            self.qk_clip.metrics(*logits_read) if self.qk_clip else {},
            mine,
            next_counts,
            maxima,
            {
                **({"mtp_loss": mtp_loss} if self.mtp else {}),
                **({"indexer_loss": indexer_total / max(1, tokens)} if self.indexers else {}),
            },
            changed_weights,
        )

    def _build_calls(
        self,
        batches: Sequence[MicroBatch],
        number: int,
        divisor: float,
        preference_step: PreferenceStep | None,
    ) -> list[ModelInputs]:
        """The model's inputs for each micro-batch, with its loss."""
        if preference_step:
            output_fns = [
                preference_step.reduce(batch, index) for index, batch in enumerate(batches)
            ]
        else:
            output_fns = [self._build_output_fn(batch, self.loss_fn, divisor) for batch in batches]
        return [
            self.model.build_inputs(
                batch, output_fn, self.ranks.device, self._dropout_rng(batch, number)
            )
            for batch, output_fn in zip(batches, output_fns, strict=True)
        ]

    def _read(
        self,
        mine: torch.Tensor,
        norm: torch.Tensor,
        following: Prefetch,
        totals: Sequence[torch.Tensor],
        logits: torch.Tensor | None,
    ) -> tuple[
        float, float, TokenCounts | None, tuple[int, ...], list[list[float]], Sequence[float]
    ]:
        """The loss over all ranks, the norm, the next step's counts, the maxima, the sums of
        `totals` (fp64 [M] each) over all ranks, and `logits` (fp64): one sync."""
        device = self.ranks.device
        local_counts = to_device(self._local_counts(following.batches), device)
        sums = torch.cat([mine.double().reshape(1), local_counts, *totals])
        pieces = [self.ranks.all_reduce_sum(sums), norm.double().reshape(1)]
        if logits is not None:
            pieces.append(logits)
        if maxima := (*following.maxima, *self._local_parts(following.batches)):
            numbers = to_device(torch.tensor(maxima, dtype=torch.int64), device)
            pieces.append(self.ranks.all_reduce_max(numbers).double())
        loss, tokens, trained, loss_weight, *more = torch.cat(pieces).tolist()
        found: list[list[float]] = []
        for one in totals:
            values, more = _cut(more, len(one))
            found.append(values)
        norm_value, *more = more
        of_logits, more = _cut(more, 0 if logits is None else len(logits))
        highest = tuple(map(int, more))
        given = len(following.maxima)
        counts = None
        if following.batches:
            counts = self._counts_per_replica(tokens, trained, loss_weight, highest[given:])
        return loss, norm_value, counts, highest[:given], found, of_logits

    def _gradient_norm(self, trainable: Sequence[LocalParam]) -> torch.Tensor:
        return (
            self.optimizer_in_backward.norm()
            if self.optimizer_in_backward
            else gradient_norm(trainable, self.ranks)
        )

    def _update(
        self, trainable: Sequence[LocalParam], norm: float, *, measures_changes: bool
    ) -> float | None:
        """Clip the gradients and step the optimizer; returns the share of changed weights."""
        scale_gradients(trainable, norm, self.max_grad_norm)
        before = ChangedWeights(trainable) if measures_changes else None
        if self.cpu_offload:
            self.cpu_offload.copy_to_cpu()
        self.optimizer.step()
        if self.qk_clip:
            self.qk_clip.clip()
        if self.cpu_offload:
            self.cpu_offload.copy_back()
        if self.grad_scaler:
            self.grad_scaler.on_finite_step()
        return before.share(self.ranks) if before else None

    def _non_finite_error(
        self, batches: Sequence[MicroBatch], norm: torch.Tensor, number: int
    ) -> StageError:
        """Build the error for non-finite gradients in the step with this number, from 0."""
        if self.optimizer_in_backward:
            return StageError(
                f"the gradient norm of step {number + 1} is {norm.item()}, and with "
                "train.fuse_optimizer_step the weights were already updated with it.\n"
                "  Lower train.lr and resume from the last checkpoint, which is intact; without "
                "fuse_optimizer_step the rows that cause it are found."
            )
        self.ranks.heartbeat.set_phase("locating non-finite gradients")

        def loss_of(batch: MicroBatch) -> float:
            output_fn = self._build_output_fn(batch, self.eval_loss_fn, 1)
            return self.model.forward(
                [self.model.build_inputs(batch, output_fn, self.ranks.device)]
            ).item()

        with torch.no_grad():
            found = locate_non_finite(batches, loss_of, self.model.trainable, self.ranks)
        return StageError(
            f"the gradient norm of step {number + 1} is {norm.item()}; the weights were left as "
            f"they were.\n  {found}\n"
            "  Look at those rows in the packed data, or lower train.lr; the last checkpoint is "
            "intact."
        )

    def _dropout_rng(self, batch: MicroBatch, step: int) -> DropoutRNG | None:
        if self.dropout_seed is None:
            return None
        places_T = self.model.context.shard_tensor(batch.places())
        return DropoutRNG(self.dropout_seed, step, to_device(places_T, self.ranks.device))

    def _build_output_fn(self, batch: MicroBatch, losses: SumLossFn, divisor: float) -> OutputFn:
        """Function from hidden states and LM head to this rank's summed token losses over
        `divisor`.
        """
        labels = self.model.context.shard_labels(batch, self.ranks.device)

        def output_fn(hidden_TD: torch.Tensor, head: nn.Module) -> torch.Tensor:
            return losses(hidden_TD, head, labels, scale=1 / divisor)

        return output_fn

    def _read_counts(self, batches: Sequence[MicroBatch]) -> TokenCounts:
        counts = to_device(self._local_counts(batches), self.ranks.device)
        tokens, trained, loss_weight = self.ranks.all_reduce_sum(counts).tolist()
        mine = self._local_parts(batches)
        parts = self.ranks.max_over_ranks(*mine) if mine else ()
        return self._counts_per_replica(tokens, trained, loss_weight, parts)

    def _counts_per_replica(
        self, tokens: float, trained: float, loss_weight: float, parts: Sequence[int]
    ) -> TokenCounts:
        """Every rank of a replica counts the same batch, so the sums over all ranks are divided."""
        each = self.model.model_parallel_size
        numbers = round(tokens) // each, round(trained) // each
        return TokenCounts(*numbers, loss_weight / each, tuple(parts))

    def _local_parts(self, batches: Sequence[MicroBatch]) -> tuple[int, ...]:
        """The parts that this rank needs of each micro-batch; none where they are not split."""
        return tuple(map(num_parts, batches)) if self.splits_by_length else ()

    @staticmethod
    def _split(batches: Sequence[MicroBatch], counts: TokenCounts) -> Sequence[MicroBatch]:
        """The parts of the micro-batches, the same number on all ranks."""
        if not counts.parts:
            return batches
        pairs = zip(batches, counts.parts, strict=True)
        return [part for one, number in pairs for part, _ in split_by_length(one, number)]

    @staticmethod
    def _local_counts(batches: Sequence[MicroBatch]) -> torch.Tensor:
        """This rank's tokens, trained tokens and loss weight, fp64 [3] on the host."""
        counts = [(b.num_tokens, b.num_trained, b.loss_weight) for b in batches]
        return torch.tensor(counts, dtype=torch.float64).view(-1, 3).sum(0)


def _cut(values: list[float], count: int) -> tuple[list[float], list[float]]:
    """The first `count` values, and the rest."""
    return values[:count], values[count:]
