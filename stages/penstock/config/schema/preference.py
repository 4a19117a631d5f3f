"""Preference training: the loss and its coefficients."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.effect import OnlyWith

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
"""Losses without a reference model."""

AVERAGED: frozenset[LossType] = frozenset({"ipo", "simpo", "or", "orpo"})
"""Losses of the mean log-probability of a completion's tokens."""

WITH_BASELINE: frozenset[LossType] = frozenset({"kto_pair", "kto"})
"""Losses that estimate the KL divergence from the reference model over the whole step."""

WITH_SFT: frozenset[LossType] = frozenset({"cpo", "orpo"})
"""Losses that include the cross-entropy of the chosen completion."""

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
"""The losses that use a field, for every field that some do not use."""


def _check_precompute(value: bool) -> bool:
    if not value:
        raise ValueError(
            "reference log-probs are always computed before training and reused by other runs;"
            " leave precompute_ref_logps out"
        )
    return value


class PreferenceConfig(ConfigSection):
    """Preference training (`train.objective: preference`). A field that the loss does not use is an
    error."""

    conditions: ClassVar[tuple[OnlyWith, ...]] = (
        OnlyWith(
            "train.objective",
            ("preference",),
            words="train.objective: preference",
            why="is not used with train.{name}: {value}",
        ),
    )

    loss_type: LossType = "sigmoid"
    """Loss. With a reference model: `sigmoid` (DPO), `hinge` (SLiC), `ipo` (IPO), `dpop`
    (DPO-Positive), `sppo_hard` (SPPO), `nca_pair` (NCA), `kto_pair` (KTO of pairs), `kto` (KTO of
    single completions, data of type `kto`; all others take pairs). Without one: `simpo` (SimPO),
    `cpo` (CPO), `or` (the odds-ratio term of ORPO), `orpo` (ORPO)."""

    beta: float = Field(default=0.1, gt=0)
    """Beta: a lower value lets the model move further from the reference model. Logged rewards are
    log-ratios times beta."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """`sigmoid`, `simpo` and `cpo`: fraction of preference labels that are assumed to be flipped
    (conservative DPO)."""

    offset_alpha: float = Field(default=0.0, ge=0)
    """`sigmoid`: ODPO: the margin between the two rewards must be larger by `offset_alpha` times
    the log of the difference of the two scores. Needs `field_chosen_score` and
    `field_rejected_score` of the data."""

    simpo_gamma: float = Field(default=0.5, ge=0)
    """`simpo`: target margin (gamma) between the rewards of the chosen and the rejected
    completion."""

    dpop_lambda: float = Field(default=50.0, ge=0)
    """`dpop`: coefficient (lambda) of the penalty for a chosen completion that has become less
    likely than under the reference model."""

    dpop_penalty: Literal["inside", "outside"] = "inside"
    """`dpop`: whether the penalty is part of the margin inside the sigmoid, as in the paper, or
    added to the loss (`outside`), as in ERNIEKit."""

    desirable_weight: float = Field(default=1.0, ge=0)
    """`kto`: weight of desirable completions."""

    undesirable_weight: float = Field(default=1.0, ge=0)
    """`kto`: weight of undesirable completions."""

    kl_pairing: KLPairing = "other_prompt"
    """`kto`: the mismatched completion that is paired with each prompt to estimate the KL
    divergence. `other_prompt`: that of the nearest earlier sample, in the order of the data, with
    another prompt. `rotate`: that of the previous sample, whatever its prompt, as in TRL and
    LLaMA-Factory. The pair is truncated to `max_seq_len` of the datasets; not at all if that is
    unset."""

    kl_rotation_size: int | None = Field(default=None, gt=0)
    """`kl_pairing: rotate`: number of consecutive samples within which completions rotate; in TRL,
    `per_device_train_batch_size`. Unset: all samples."""

    pref_loss_ratio: float = Field(default=1.0, ge=0)
    """Coefficient of the preference loss; elsewhere called the beta of ORPO."""

    sft_loss_ratio: float | None = Field(default=None, ge=0)
    """Coefficient of the added SFT loss: cross-entropy of the chosen completions (`kto`: of the
    desirable ones). Unset: 1 for `orpo` and `cpo`, else 0."""

    reference_free: bool = False
    """`sigmoid`, `hinge` and `ipo`: use no reference model, as if it gave all completions the same
    probability."""

    ref_update_steps: int = -1
    """Replace the reference model by the current model every `ref_update_steps` steps; -1: never.
    Evaluations always use the initial model as the reference. Not with adapters, whose reference is
    the base model."""

    precompute_ref_logps: Annotated[bool, AfterValidator(_check_precompute)] = True
    """Must be true: the stage `reference` computes reference log-probs before training, once for
    all runs that start from the same model."""

    length_normalize: Normalization | None = None
    """Length normalization of log-probs of completions: sum over tokens (`none`), mean over tokens
    (`mean`), or sum scaled as if both completions of a pair had their mean length (`pair_mean`).
    Unset: `mean` for `ipo`, `simpo`, `or` and `orpo`, which are defined with it and allow nothing
    else, `none` for others."""

    sft_loss_scope: Annotated[
        Literal["answer", "prompt_and_answer"],
        OnlyWith(
            "preference.has_sft_loss",
            words="sft_loss_ratio",
            why="there is no SFT loss without sft_loss_ratio",
        ),
    ] = "answer"
    """Tokens of the SFT loss: those of completions (`answer`), or those of their prompts too, as in
    TRL's ORPO. Used where `sft_loss_ratio` is not 0."""

    @property
    def has_reference(self) -> bool:
        """Whether the loss uses a reference model."""
        return self.loss_type not in REFERENCE_FREE and not self.reference_free

    @property
    def normalization(self) -> Normalization:
        """The resolved `length_normalize`."""
        if self.length_normalize is not None:
            return self.length_normalize
        return "mean" if self.loss_type in AVERAGED else "none"

    @property
    def sft_weight(self) -> float:
        """The resolved `sft_loss_ratio`."""
        if self.sft_loss_ratio is not None:
            return self.sft_loss_ratio
        return 1.0 if self.loss_type in WITH_SFT else 0.0

    @property
    def has_sft_loss(self) -> bool:
        """Whether an SFT loss is added."""
        return self.sft_weight > 0

    @property
    def learns_prompts(self) -> bool:
        """Whether the SFT loss includes the tokens of prompts."""
        return self.sft_weight > 0 and self.sft_loss_scope == "prompt_and_answer"

    @property
    def needs_baseline(self) -> bool:
        """Whether the loss estimates the KL divergence from the reference model over the step."""
        return self.loss_type in WITH_BASELINE
