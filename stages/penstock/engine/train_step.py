"""Train step: gradient accumulation over micro-batches, gradient clipping, one optimizer step.

The loss is the sum of the losses of all trained tokens of the step, over every rank and
micro-batch, divided by the number of trained tokens. In preference training it is the sum over
samples divided by the number of samples. It does not depend on how the step is split into
micro-batches and ranks. Router losses are reported separately.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from penstock.core.errors import StageError
from penstock.engine.checkpoint.async_staging import PreUpdateHooks
from penstock.engine.distributed.parallel_model import ParallelModel
from penstock.engine.distributed.param_shards import LocalParam
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.distributed.vocab_parallel import SumOfLosses
from penstock.engine.losses.preference import Preferences
from penstock.engine.moe.load_balancing import Routers
from penstock.engine.non_finite import locate_non_finite
from penstock.engine.optim.clip_grad import gradient_norm, scale_gradients
from penstock.engine.optim.cpu_offload import CPUOffloadedParams
from penstock.engine.optim.grad_scaler import GradScaler
from penstock.engine.optim.norm_metrics import Norms
from penstock.engine.optim.optimizer_in_backward import OptimizerInBackward
from penstock.engine.peft.relora import ReLoRA
from penstock.models.decoder import Reduce
from penstock.models.layers.dropout import DropoutRNG
from penstock.optim.groups import set_lr
from penstock.rows.collate import MicroBatch


@dataclass(frozen=True)
class StepResult:
    """The metrics of one step; the same on every rank."""

    loss: float
    grad_norm: float
    tokens: int
    trained_tokens: int
    of_routers: Mapping[str, Any]
    """Router metrics by name: auxiliary losses, which are not part of `loss`, and load statistics.
    """
    of_norms: Mapping[str, Any]
    """Norm metrics other than `grad_norm`, by name."""
    of_scaling: Mapping[str, Any]
    """Loss-scale metrics, by name."""
    of_preferences: Mapping[str, Any]
    """Preference metrics, by name."""
    share: torch.Tensor
    """This rank's part of `loss`, a scalar; the only field that differs between ranks."""


@dataclass(frozen=True)
class TrainStep:
    """A parallelized model with its optimizer: everything a step needs."""

    layout: ParallelModel
    optimizer: torch.optim.Optimizer
    ranks: ProcessInfo
    sum_of_losses: SumOfLosses
    told_losses: SumOfLosses
    """The losses used for validation."""
    max_grad_norm: float
    noise_seed: int | None = None
    """Seed of dropout and noise; None when the model has neither."""
    preferences: Preferences | None = None
    """None in training on a per-token loss."""
    routers: Routers | None = None
    """None when a step does nothing with routers."""
    merging: ReLoRA | None = None
    """None when adapters are not merged into the weights."""
    norms: Norms | None = None
    """None when only the total gradient norm is logged."""
    scaling: GradScaler | None = None
    """None without loss scaling."""
    fused: OptimizerInBackward | None = None
    """Steps the optimizer in the backward pass; None when it steps afterwards."""
    copies: CPUOffloadedParams | None = None
    """CPU copies of the parameters that the optimizer steps; None when it steps the parameters."""
    changes: PreUpdateHooks = field(default_factory=PreUpdateHooks)
    """Hooks called before weights or optimizer states are modified."""

    def step(
        self,
        batches: Sequence[MicroBatch],
        lr: float,
        number: int,
        references: Sequence[torch.Tensor] = (),
    ) -> StepResult:
        """Run forward, backward and update of one step.

        `number` is the step number, from 0; it seeds dropout and decides whether adapters are
        merged. `references` are the reference log-probs of each micro-batch's completions, [D, A],
        in preference training with a reference model. Raises StageError if the gradients are not
        finite; if a smaller loss scale may help, it skips the update instead.
        """
        tokens, trained = self._count_tokens(batches)
        scale = self.scaling.scale if self.scaling else 1.0
        preferred = None
        if self.preferences:
            preferred = self.preferences.begin_step(batches, references, scale)
            reduces = [preferred.reduce(batch, index) for index, batch in enumerate(batches)]
        else:
            divisor = max(1, trained) / scale
            reduces = [self._summed(batch, self.sum_of_losses, divisor) for batch in batches]
        calls = [
            self.layout.build_inputs(batch, reduce, self.ranks.device, self._noise(batch, number))
            for batch, reduce in zip(batches, reduces, strict=True)
        ]
        self.ranks.heartbeat.set_phase("forward")
        if self.routers:
            layout = self.layout
            calls = self.routers.with_observers(
                calls, batches, tokens, layout.context, layout.forward_for_observers, scale=scale
            )
        set_lr(self.optimizer, lr)
        mine = self.layout.forward_backward(calls) / scale
        self.ranks.heartbeat.set_phase("update")
        trainable = self.layout.trainable
        if self.scaling:
            self.scaling.unscale(trainable)
        norms = self.norms.of_gradients() if self.norms and not self.fused else None
        norm = norms.total if norms else self._norm(trainable)
        is_finite = bool(torch.isfinite(norm))
        if not is_finite and not (self.scaling and self.scaling.on_overflow()):
            raise self._not_finite(batches, norm, number)
        # Call the hooks on skipped updates too: merging and router biases also modify weights.
        self.changes.run()
        if is_finite and not self.fused:
            self._update(trainable, norm)
        for held in trainable:
            held.parameter.grad = None
        if self.merging and self.merging.is_due(number + 1):
            self.ranks.heartbeat.set_phase("merging adapters")
            self.merging.merge(number + 1)
        told = self.routers.finish_step(tokens) if self.routers else {}
        of_norms = self.norms.metrics(norms) if self.norms and norms else {}
        of_scaling = {"loss_scale": scale, "skipped": not is_finite} if self.scaling else {}
        loss = self.ranks.all_reduce_sum(mine.clone()).item()
        return StepResult(
            loss,
            # Report 0 on overflow: the norm of overflowed gradients is meaningless.
            norm.item() if is_finite else 0.0,
            tokens,
            trained,
            told,
            of_norms if is_finite else {},
            of_scaling,
            preferred.metrics() if preferred else {},
            mine,
        )

    def _norm(self, trainable: Sequence[LocalParam]) -> torch.Tensor:
        return self.fused.norm() if self.fused else gradient_norm(trainable, self.ranks)

    def _update(self, trainable: Sequence[LocalParam], norm: torch.Tensor) -> None:
        """Clip the gradients and step the optimizer."""
        scale_gradients(trainable, norm, self.max_grad_norm)
        if self.copies:
            self.copies.copy_to_cpu()
        self.optimizer.step()
        if self.copies:
            self.copies.copy_back()
        if self.scaling:
            self.scaling.on_finite_step()

    def _not_finite(
        self, batches: Sequence[MicroBatch], norm: torch.Tensor, number: int
    ) -> StageError:
        """Build the error for non-finite gradients in the step with this number, from 0."""
        if self.fused:
            return StageError(
                f"the gradient norm of step {number + 1} is {norm.item()}, and with "
                "train.fuse_optimizer_step weights have moved along it already.\n"
                "  Lower train.lr and go on from the last checkpoint, which is intact; without "
                "fuse_optimizer_step the rows that do it are found."
            )
        self.ranks.heartbeat.set_phase("finding what is not finite")

        def loss_of(batch: MicroBatch) -> float:
            reduce = self._summed(batch, self.told_losses, 1)
            return self.layout.forward(
                [self.layout.build_inputs(batch, reduce, self.ranks.device)]
            ).item()

        with torch.no_grad():
            found = locate_non_finite(batches, loss_of, self.layout.trainable, self.ranks)
        return StageError(
            f"the gradient norm of step {number + 1} is {norm.item()}; the weights were left as "
            f"they were.\n  {found}\n"
            "  Look at those rows in the packed data, or lower train.lr; the last checkpoint is "
            "intact."
        )

    def _noise(self, batch: MicroBatch, step: int) -> DropoutRNG | None:
        if self.noise_seed is None:
            return None
        places_T = self.layout.context.shard_tensor(batch.places())
        return DropoutRNG(self.noise_seed, step, places_T.to(self.ranks.device, non_blocking=True))

    def _summed(self, batch: MicroBatch, losses: SumOfLosses, divisor: float) -> Reduce:
        """Function from hidden states and LM head to this rank's summed token losses over
        `divisor`.
        """
        labels_T = self.layout.context.shard_tensor(batch.labels_T)
        labels_T = labels_T.to(self.ranks.device, non_blocking=True)

        def reduce(hidden_TD: torch.Tensor, head: nn.Module) -> torch.Tensor:
            return losses(hidden_TD, head, labels_T, scale=1 / divisor)

        return reduce

    def _count_tokens(self, batches: Sequence[MicroBatch]) -> tuple[int, int]:
        """Count tokens and trained tokens of all replicas.

        Every rank of a replica counts the same batch, so the sum is divided by the ranks per
        replica.
        """
        mine = [sum(b.num_tokens for b in batches), sum(b.num_trained for b in batches)]
        counted = self.ranks.all_reduce_sum(torch.tensor(mine, device=self.ranks.device))
        tokens, trained = (counted // self.layout.model_parallel_size).tolist()
        return tokens, trained
