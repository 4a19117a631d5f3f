"""Preference training (DPO, KTO and similar): the loss of a step over samples.

It is the mean over the samples of the whole step, on all replicas, so it does not depend on how the
step is split. D samples of a micro-batch, A completions of each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.config.schema.preference import PreferenceConfig
from penstock.engine.losses.sequence_logprobs import (
    CompletionLogProbsFn,
    SequenceLogProbs,
    num_prompt_tokens,
    num_tokens,
)
from penstock.engine.step_part import StepPart, StepState
from penstock.losses.preference import (
    PreferenceInputs,
    kl_baseline,
    length_normalize,
    preference_losses,
)
from penstock.losses.preference_metrics import (
    NAMES,
    PREFERENCE_LOSS,
    SFT_LOSS,
    metric_sums,
    metrics_by_name,
)
from penstock.models.decoder import OutputFn
from penstock.rows.collate import MicroBatch
from penstock.rows.shared_prefix import PER_SAMPLE
from penstock_kernels.to_device import to_device


@dataclass(frozen=True)
class PreferenceBatch:
    """Inputs of the loss of a micro-batch, except the policy's log-probs; fp64."""

    reference_DA: torch.Tensor  # noqa: N815 - DA names the dimensions
    """Reference log-probs; zeros without a reference model."""
    tokens_DA: torch.Tensor  # noqa: N815
    prompt_tokens_D: torch.Tensor  # noqa: N815
    """Prompt tokens trained with cross-entropy; zeros if it only trains completions."""
    desirable_D: torch.Tensor | None  # noqa: N815
    """Whether the first completion is desirable (KTO); None for pairs."""
    score_gap_D: torch.Tensor | None = None  # noqa: N815
    """By how much the first completion is scored higher; None if no loss uses it."""

    def ratios(self, policy_DA: torch.Tensor, config: PreferenceConfig) -> torch.Tensor:
        """The log-ratios of policy to reference, normalized, [D, A]."""
        ratios_DA = policy_DA[:, :PER_SAMPLE] - self.reference_DA
        return length_normalize(ratios_DA, self.tokens_DA, config.normalization)

    def losses(
        self, policy_DA: torch.Tensor, baseline_A: torch.Tensor | None, config: PreferenceConfig
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of each sample, [D], and the sums for the metrics, [M, 2]."""
        ratios_DA = self.ratios(policy_DA, config)
        inputs = PreferenceInputs(ratios_DA, baseline_A, self.desirable_D, self.score_gap_D)
        losses_D, sft = preference_losses(inputs, config), self.sft_log_probs(policy_DA)
        sums = metric_sums(
            policy_DA[:, :PER_SAMPLE],
            ratios_DA,
            losses_D,
            (sft, self.sft_tokens_D),
            self.desirable_D,
            config,
        )
        return losses_D, sums

    @property
    def sft_tokens_D(self) -> torch.Tensor:  # noqa: N802
        """The tokens of each sample trained with cross-entropy, [D]."""
        return (self.tokens_DA[:, 0] + self.prompt_tokens_D) * self.sft_mask_D

    def sft_log_probs(self, policy_DA: torch.Tensor) -> torch.Tensor:
        return (policy_DA[:, 0] + policy_DA[:, PER_SAMPLE:].sum(1)) * self.sft_mask_D

    @property
    def sft_mask_D(self) -> torch.Tensor:  # noqa: N802 - D names the dimension
        """1 if cross-entropy trains the first completion, else 0."""
        if self.desirable_D is None:
            return torch.ones_like(self.tokens_DA[:, 0])
        return self.desirable_D.to(self.tokens_DA.dtype)


@dataclass
class Preferences(StepPart):
    """Preference training of a parallelized model."""

    config: PreferenceConfig
    sums: SequenceLogProbs
    _metric_totals: torch.Tensor = field(init=False, repr=False)
    """This rank's sums for the metrics, [M, 2], filled during the passes."""

    def before_forward(self, step: StepState) -> None:
        """Set the loss, multiplied by the loss scale. With a baseline, all completions pass through
        the model once more before."""
        inputs = self._build_inputs(step.batches, step.references)
        counts = torch.zeros(2, dtype=torch.float64, device=self.sums.ranks.device)
        counts[0] += sum(len(batch.tokens_DA) for batch in inputs)
        for batch in inputs:
            counts[1] += batch.sft_tokens_D.sum()
        self.sums.ranks.all_reduce_sum(counts)
        # Every rank of a replica has counted the same samples. Left on the device: no sync here.
        # At least 1: where no answer of a step is desirable, cross-entropy has no tokens.
        counts = (counts / self.sums.layout.model_parallel_size).clamp_min(1.0)
        evaluated = self._evaluate(step.batches, inputs) if self.config.needs_baseline else []
        baseline_A, self._metric_totals = self._baseline(evaluated), self._empty_metrics()
        output_fns: list[OutputFn] = []
        for batch, batch_inputs in zip(step.batches, inputs, strict=True):
            sums = self.sums.reducer(batch)
            output_fns.append(
                partial(self._loss, sums, batch_inputs, baseline_A, counts, step.scale)
            )
        step.set_output_fns(output_fns)
        # The loss is of samples, however many tokens count as trained.
        step.has_loss = True

    def after_backward(self, step: StepState) -> torch.Tensor:
        del step
        return self._metric_totals.flatten()

    def finish(self, step: StepState, totals: Sequence[float]) -> Mapping[str, Any]:
        del step
        return metrics_by_name([totals[start : start + 2] for start in range(0, len(totals), 2)])

    def _loss(
        self,
        sums: CompletionLogProbsFn,
        inputs: PreferenceBatch,
        baseline_A: torch.Tensor | None,
        counts: torch.Tensor,
        scale: float,
        hidden: torch.Tensor,
        head: nn.Module,
    ) -> torch.Tensor:
        """This rank's part of the loss of one micro-batch, a scalar in fp32, whose gradient is that
        of the whole loss. `counts`: samples and tokens trained with cross-entropy of the step.
        """
        config, (num_samples, num_sft_tokens) = self.config, counts.unbind()
        policy_DA = sums(hidden, head)
        losses_D, metrics = inputs.losses(policy_DA, baseline_A, config)
        loss = config.pref_loss_ratio * losses_D.sum() / num_samples
        if config.sft_weight:
            sft_tokens = -inputs.sft_log_probs(policy_DA).sum() / num_sft_tokens
            loss = loss + config.sft_weight * sft_tokens
        if self.sums.layout.is_loss_rank:
            self._metric_totals.add_(metrics)
        else:
            # Ranks that share packed sequences compute the same loss; one of them reports it.
            loss = loss - loss.detach()
        return (loss * scale).float()

    def forward_only(
        self, batches: Sequence[MicroBatch], references: Sequence[torch.Tensor]
    ) -> "list[CompletionLogProbs]":
        """Evaluate completions without training, on the ranks that report; nothing on others.
        Collective."""
        return self._evaluate(batches, self._build_inputs(batches, references))

    def _evaluate(
        self, batches: Sequence[MicroBatch], inputs: Sequence[PreferenceBatch]
    ) -> "list[CompletionLogProbs]":
        evaluated = [
            CompletionLogProbs(policy_DA, batch)
            for policy_DA, batch in zip(self.sums.gather(batches), inputs, strict=True)
        ]
        return evaluated if self.sums.is_loss_rank else []

    @torch.no_grad()
    def compute_loss(
        self, evaluated: "Sequence[CompletionLogProbs]"
    ) -> tuple[float, Mapping[str, float]]:
        """The loss over all completions that any rank has evaluated, and metrics by name.
        Collective."""
        config, metric_totals = self.config, self._empty_metrics()
        baseline_A = self._baseline(evaluated)
        for policy_DA, inputs in evaluated:
            metric_totals += inputs.losses(policy_DA, baseline_A, config)[1]
        metrics = metrics_by_name(self.sums.ranks.all_reduce_sum(metric_totals).tolist())
        loss = config.pref_loss_ratio * metrics.get(PREFERENCE_LOSS, 0.0)
        return loss + config.sft_weight * metrics.get(SFT_LOSS, 0.0), metrics

    def _build_inputs(
        self, batches: Sequence[MicroBatch], references: Sequence[torch.Tensor]
    ) -> list[PreferenceBatch]:
        device = self.sums.ranks.device
        inputs: list[PreferenceBatch] = []
        for index, batch in enumerate(batches):
            tokens_DA = to_device(num_tokens(batch), device).double()
            reference_DA = torch.zeros_like(tokens_DA)
            if references:
                reference_DA = to_device(references[index], device).double()
            judged_D = gap_D = None
            if self.config.loss_type == "kto":
                desirable = batch.branching.desirable if batch.branching else ()
                judged_D = to_device(torch.tensor(desirable, dtype=torch.bool), device)
            if self.config.offset_alpha:
                gaps = batch.branching.score_gaps if batch.branching else ()
                gap_D = to_device(torch.tensor(gaps, dtype=torch.float64), device)
            prompt_tokens_D = torch.zeros_like(tokens_DA[:, 0])
            if self.config.learns_prompts:
                prompt_tokens_D = to_device(num_prompt_tokens(batch), device).to(prompt_tokens_D)
            inputs.append(
                PreferenceBatch(reference_DA, tokens_DA, prompt_tokens_D, judged_D, gap_D)
            )
        return inputs

    def _baseline(self, evaluated: "Sequence[CompletionLogProbs]") -> torch.Tensor | None:
        """The baseline over all completions that any rank has evaluated, [A], the same on all
        ranks; None if no loss uses it.
        """
        if not self.config.needs_baseline:
            return None
        sums = torch.zeros(PER_SAMPLE + 1, dtype=torch.float64, device=self.sums.ranks.device)
        for policy_DA, inputs in evaluated:
            sums[:-1] += inputs.ratios(policy_DA, self.config).sum(0)
            sums[-1] += len(policy_DA)
        *_, count = self.sums.ranks.all_reduce_sum(sums)
        return kl_baseline(sums[:-1], count)

    def _empty_metrics(self) -> torch.Tensor:
        return torch.zeros(len(NAMES), 2, dtype=torch.float64, device=self.sums.ranks.device)


class CompletionLogProbs(NamedTuple):
    """A model's log-probs of the completions of a micro-batch."""

    policy_DA: torch.Tensor  # noqa: N815
    """Log-probs summed over tokens, fp64; a last column has those of prompts, if trained."""
    inputs: PreferenceBatch
