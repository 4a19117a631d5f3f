"""The loss that a run asks for."""

from dataclasses import replace

import torch

from penstock.config.schema.run import RunConfig
from penstock.engine.backends.compile import require_compiler
from penstock.engine.distributed.parallel_model import Layout
from penstock.engine.distributed.ranks import Ranks
from penstock.engine.distributed.vocab_parallel import Vocabulary
from penstock.engine.losses.preference import Preferences
from penstock.engine.losses.sequence_logprobs import AnswerSums
from penstock.losses.cross_entropy import Loss, Precision
from penstock_kernels.cross_entropy import Terms


def trained_loss(run: RunConfig, device: torch.device) -> Loss:
    """What the settings say.

    Raises CapabilityError where nothing compiles, and something should be compiled.
    """
    train = run.train
    if train.ce_mode == "compiled":
        require_compiler(
            device, "train.ce_mode is compiled", "Write chunked, which needs no compiler."
        )
    terms = Terms(smoothing=train.label_smoothing, z=train.z_loss_coef)
    return Loss(terms, mode=train.ce_mode, precision=_precision(run))


def told_loss(run: RunConfig) -> Loss:
    """Plain cross-entropy, by which models are compared; computed as the settings say."""
    return Loss(mode=run.train.ce_mode, precision=_precision(run))


def preferences_of(
    run: RunConfig, layout: Layout, vocabulary: Vocabulary, ranks: Ranks
) -> Preferences | None:
    """What learns from preferences; None where tokens are learnt."""
    if run.train.objective != "preference":
        return None
    sums = answer_sums(run, layout, vocabulary, ranks)
    return Preferences(run.preference, replace(sums, with_prompts=run.preference.learns_prompts))


def answer_sums(run: RunConfig, layout: Layout, vocabulary: Vocabulary, ranks: Ranks) -> AnswerSums:
    """The log-probabilities of answers, computed as the settings say."""
    return AnswerSums(layout, ranks, vocabulary.log_probs(told_loss(run)))


def _precision(run: RunConfig) -> Precision:
    return "fp32" if run.model.lm_head_fp32 else "model"
