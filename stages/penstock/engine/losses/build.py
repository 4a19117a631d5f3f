"""Build the loss of a run."""

from dataclasses import replace

import torch

from penstock.config.schema.run import RunConfig
from penstock.core.extensions import LOSSES
from penstock.engine.backends.compile import require_compiler
from penstock.engine.distributed.parallel_model import ParallelModel
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.distributed.vocab_parallel import VocabParallelHead
from penstock.engine.losses.preference import Preferences
from penstock.engine.losses.sequence_logprobs import SequenceLogProbs
from penstock.losses.cross_entropy import Loss, Precision
from penstock.losses.logits_loss import LogitsLoss
from penstock_kernels.cross_entropy import LossOptions


def train_loss_fn(run: RunConfig, device: torch.device, soft_cap: float | None = None) -> Loss:
    """The training loss of a model with this soft cap of its logits. Raises CapabilityError if
    compilation is requested and not available."""
    train = run.train
    if train.ce_mode == "compiled":
        write = "Write chunked, which needs no compiler."
        require_compiler(device, "train.ce_mode is compiled", write)
    terms = LossOptions(train.label_smoothing, train.z_loss_coef, soft_cap)
    loss = LOSSES.build(train.loss, train.loss_kwargs)
    package = loss if isinstance(loss, LogitsLoss) else None
    return Loss(terms, mode=train.ce_mode, precision=_precision(run), package=package)


def eval_loss_fn(run: RunConfig, soft_cap: float | None) -> Loss:
    """The evaluation loss: plain cross-entropy, so that models are comparable."""
    return Loss(LossOptions(soft_cap=soft_cap), mode=run.train.ce_mode, precision=_precision(run))


def build_preference_loss(
    run: RunConfig, layout: ParallelModel, vocabulary: VocabParallelHead, ranks: ProcessInfo
) -> Preferences | None:
    """The preference loss; None in training on a per-token loss."""
    if run.train.objective != "preference":
        return None
    sums = build_sequence_logprobs(run, layout, vocabulary, ranks)
    return Preferences(run.preference, replace(sums, with_prompts=run.preference.learns_prompts))


def build_sequence_logprobs(
    run: RunConfig, layout: ParallelModel, vocabulary: VocabParallelHead, ranks: ProcessInfo
) -> SequenceLogProbs:
    """The log-probs of completions."""
    loss = eval_loss_fn(run, layout.parts[0].config.logit_soft_cap)
    return SequenceLogProbs(layout, ranks, vocabulary.log_probs(loss))


def _precision(run: RunConfig) -> Precision:
    return "fp32" if run.model.lm_head_fp32 else "model"
