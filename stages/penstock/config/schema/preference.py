"""Which loss teaches a model to prefer one answer to another, and what it weighs."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.config.schema.base import ConfigSection

LossType = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "kto_pair",
    "kto",
    "sppo_hard",
    "nca_pair",
    "dpop",
    "simpo",
    "cpo",
    "or",
    "orpo",
]
Normalization = Literal["none", "mean", "pair_mean"]
KLPairing = Literal["other_prompt", "rotate"]

REFERENCE_FREE: frozenset[LossType] = frozenset({"simpo", "cpo", "or", "orpo"})
"""Losses that are defined without a reference model."""

AVERAGED: frozenset[LossType] = frozenset({"ipo", "simpo", "or", "orpo"})
"""Losses that are defined on a token's mean log-probability."""

WITH_BASELINE: frozenset[LossType] = frozenset({"kto_pair", "kto"})
"""Losses that compare an answer with how far the model has moved on the whole."""

WITH_SFT: frozenset[LossType] = frozenset({"cpo", "orpo"})
"""Losses of which learning the chosen answer is a part."""

USED_BY: Mapping[str, frozenset[LossType]] = {
    "beta": frozenset(
        {
            *("sigmoid", "hinge", "ipo", "kto_pair", "kto", "sppo_hard", "nca_pair", "dpop"),
            *("simpo", "cpo"),
        }
    ),
    "label_smoothing": frozenset({"sigmoid", "simpo", "cpo"}),
    "offset_alpha": frozenset({"sigmoid"}),
    "simpo_gamma": frozenset({"simpo"}),
    "dpop_lambda": frozenset({"dpop"}),
    "dpop_penalty": frozenset({"dpop"}),
    "desirable_weight": frozenset({"kto"}),
    "undesirable_weight": frozenset({"kto"}),
    "kl_pairing": frozenset({"kto"}),
    "kl_rotation_size": frozenset({"kto"}),
    "reference_free": frozenset({"sigmoid", "hinge", "ipo"}),
    "length_normalize": frozenset(
        {"sigmoid", "hinge", "kto_pair", "kto", "sppo_hard", "nca_pair", "dpop", "cpo"}
    ),
}
"""The losses that read a field, for every field that some do not."""


def _computed_before(value: bool) -> bool:
    if not value:
        raise ValueError(
            "what the reference model says is always computed before training, and kept for other"
            " runs; leave precompute_ref_logps out"
        )
    return value


class PreferenceConfig(ConfigSection):
    """Learning from preferences: `train.objective: preference`. A loss that does not use a field
    refuses it."""

    loss_type: LossType = "sigmoid"
    """`sigmoid`: DPO. `hinge`: SLiC. `ipo`: IPO. `dpop`: DPO that keeps the chosen answer likely.
    `sppo_hard`: SPPO. `nca_pair`: NCA. `kto_pair`: KTO of pairs. `kto`: KTO of answers that are
    judged one by one (data of type `kto`; all others take pairs). Without a reference model:
    `simpo`, `cpo`, `or` (ORPO's odds ratio alone) and `orpo`."""

    beta: float = Field(default=0.1, gt=0)
    """How closely the model is kept to the reference: lower lets it move further. Also what
    log-probabilities are multiplied by where they are told as rewards."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """`sigmoid`, `simpo` and `cpo`: the share of preferences that are taken to be the wrong way
    round."""

    offset_alpha: float = Field(default=0.0, ge=0)
    """`sigmoid`: by how many times the logarithm of the gap between two answers' scores the gap
    between their rewards is to be wider (ODPO). Needs `field_chosen_score` and
    `field_rejected_score` of the data."""

    simpo_gamma: float = Field(default=0.5, ge=0)
    """`simpo`: by how much the reward of the chosen answer is to be higher."""

    dpop_lambda: float = Field(default=50.0, ge=0)
    """`dpop`: the weight of what the chosen answer has become less likely by."""

    dpop_penalty: Literal["inside", "outside"] = "inside"
    """`dpop`: whether that is part of the margin within the sigmoid (as published), or added to the
    loss (as ERNIEKit does)."""

    desirable_weight: float = Field(default=1.0, ge=0)
    """`kto`: the weight of answers that are good."""

    undesirable_weight: float = Field(default=1.0, ge=0)
    """`kto`: the weight of answers that are bad."""

    kl_pairing: KLPairing = "other_prompt"
    """`kto`: which answer is paired with a prompt to estimate the KL divergence. `other_prompt`:
    that of the nearest sample before it, in the order of the data, with another prompt. `rotate`:
    that of the sample before it, whatever its prompt, as TRL and LLaMA-Factory do. The pair is cut
    at `max_seq_len` of the data sets, and nowhere if that is unset."""

    kl_rotation_size: int | None = Field(default=None, gt=0)
    """`kl_pairing: rotate`: answers rotate within groups of so many consecutive samples; TRL's
    groups have `per_device_train_batch_size`. Unset: one group of all."""

    pref_loss_ratio: float = Field(default=1.0, ge=0)
    """What the loss of preferences is multiplied by; what others call the beta of ORPO."""

    sft_loss_ratio: float | None = Field(default=None, ge=0)
    """What the cross-entropy of the chosen answers' tokens (`kto`: of the good answers') is
    multiplied by before it is added. Unset: 1 for `orpo` and `cpo`, else 0."""

    reference_free: bool = False
    """`sigmoid`, `hinge` and `ipo`: compare with no reference model, as if it found all answers
    equally likely."""

    ref_update_steps: int = -1
    """Steps after which the model as it is then becomes the reference, again and again; -1: it
    stays the model that training starts from, as it always does in evaluations. Not with adapters,
    beneath which there is only one model."""

    precompute_ref_logps: Annotated[bool, AfterValidator(_computed_before)] = True
    """Whether reference log-probabilities are computed before training. Only true: the stage
    `reference` does it, once for all runs that start from the same model."""

    length_normalize: Normalization | None = None
    """What log-probabilities of answers are: sums over their tokens (`none`), means (`mean`), or
    sums as if both answers of a pair had their mean length (`pair_mean`). Unset: `mean` for `ipo`,
    `simpo`, `or` and `orpo`, which are defined so and take nothing else, and `none` for others."""

    sft_loss_scope: Literal["answer", "prompt_and_answer"] = "answer"
    """The tokens over which that cross-entropy is averaged: those of the answers, or those of their
    prompts too, as TRL's ORPO does. Read where `sft_loss_ratio` is not 0."""

    @property
    def has_reference(self) -> bool:
        """Whether answers are compared with what a reference model makes of them."""
        return self.loss_type not in REFERENCE_FREE and not self.reference_free

    @property
    def normalization(self) -> Normalization:
        """What log-probabilities are."""
        if self.length_normalize is not None:
            return self.length_normalize
        return "mean" if self.loss_type in AVERAGED else "none"

    @property
    def sft_weight(self) -> float:
        """What the cross-entropy of chosen answers is multiplied by."""
        if self.sft_loss_ratio is not None:
            return self.sft_loss_ratio
        return 1.0 if self.loss_type in WITH_SFT else 0.0

    @property
    def learns_prompts(self) -> bool:
        """Whether cross-entropy is taken over the tokens of prompts too."""
        return self.sft_weight > 0 and self.sft_loss_scope == "prompt_and_answer"

    @property
    def needs_baseline(self) -> bool:
        """Whether the loss compares with how far the model has moved on the whole."""
        return self.loss_type in WITH_BASELINE
