"""Preference training: the loss and its coefficients."""

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from penstock.config.schema.base import ConfigSection, require
from penstock.config.schema.effect import NotWith, OnlyWith, conditions_of

LossType = Literal[
    "sigmoid", "hinge", "ipo", "kto_pair", "kto", "sppo_hard", "nca_pair", "dpop", "simpo", "cpo",
    "or", "orpo",
]  # fmt: skip
Normalization = Literal["none", "mean", "pair_mean"]
KLPairing = Literal["other_prompt", "rotate"]

# Losses without a reference model.
REFERENCE_FREE: frozenset[LossType] = frozenset({"simpo", "cpo", "or", "orpo"})

# Losses of the mean log-probability of a completion's tokens.
AVERAGED: frozenset[LossType] = frozenset({"ipo", "simpo", "or", "orpo"})

SUMMED = sorted({*get_args(LossType)} - AVERAGED)

# Losses that estimate the KL divergence from the reference model over the whole step.
WITH_BASELINE: frozenset[LossType] = frozenset({"kto_pair", "kto"})

# Losses that include the cross-entropy of the chosen completion.
WITH_SFT: frozenset[LossType] = frozenset({"cpo", "orpo"})


LOSS = "preference.loss_type"


def _used_by(*losses: LossType) -> OnlyWith:
    return OnlyWith(LOSS, losses, why="{name}: {value} does not use it")


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

    beta: Annotated[
        float,
        _used_by(
            *("sigmoid", "hinge", "ipo", "kto_pair", "kto", "sppo_hard", "nca_pair", "dpop"),
            *("simpo", "cpo"),
        ),
    ] = Field(default=0.1, gt=0)
    """Beta: a lower value lets the model move further from the reference model. Logged rewards are
    log-ratios times beta."""

    label_smoothing: Annotated[float, _used_by("sigmoid", "simpo", "cpo")] = Field(
        default=0.0, ge=0, lt=0.5
    )
    """`sigmoid`, `simpo` and `cpo`: fraction of preference labels that are assumed to be flipped
    (conservative DPO)."""

    offset_alpha: Annotated[float, _used_by("sigmoid")] = Field(default=0.0, ge=0)
    """`sigmoid`: ODPO: the margin between the two rewards must be larger by `offset_alpha` times
    the log of the difference of the two scores. Needs `field_chosen_score` and
    `field_rejected_score` of the data."""

    simpo_gamma: Annotated[float, _used_by("simpo")] = Field(default=0.5, ge=0)
    """`simpo`: target margin (gamma) between the rewards of the chosen and the rejected
    completion."""

    dpop_lambda: Annotated[float, _used_by("dpop")] = Field(default=50.0, ge=0)
    """`dpop`: coefficient (lambda) of the penalty for a chosen completion that has become less
    likely than under the reference model."""

    dpop_penalty: Annotated[Literal["inside", "outside"], _used_by("dpop")] = "inside"
    """`dpop`: whether the penalty is part of the margin inside the sigmoid, as in the paper, or
    added to the loss (`outside`), as in ERNIEKit."""

    desirable_weight: Annotated[float, _used_by("kto")] = Field(default=1.0, ge=0)
    """`kto`: weight of desirable completions."""

    undesirable_weight: Annotated[float, _used_by("kto")] = Field(default=1.0, ge=0)
    """`kto`: weight of undesirable completions."""

    kl_pairing: Annotated[KLPairing, _used_by("kto")] = "other_prompt"
    """`kto`: the mismatched completion that is paired with each prompt to estimate the KL
    divergence. `other_prompt`: that of the nearest earlier sample, in the order of the data, with
    another prompt. `rotate`: that of the previous sample, whatever its prompt, as in TRL and
    LLaMA-Factory. The pair is truncated to `max_seq_len` of the datasets; not at all if that is
    unset."""

    kl_rotation_size: Annotated[
        int | None,
        _used_by("kto"),
        OnlyWith("preference.kl_pairing", ("rotate",), why="is used with kl_pairing: rotate only"),
    ] = Field(default=None, gt=0)
    """`kl_pairing: rotate`: number of consecutive samples within which completions rotate; in TRL,
    `per_device_train_batch_size`. Unset: all samples."""

    pref_loss_ratio: Annotated[
        float,
        NotWith(
            "preference.sft_weight",
            (0,),
            of=(0,),
            why="both losses have weight 0, so nothing is trained",
            instead="raise it or sft_loss_ratio",
            reads=("preference.sft_loss_ratio",),
        ),
    ] = Field(default=1.0, ge=0)
    """Coefficient of the preference loss; elsewhere called the beta of ORPO."""

    sft_loss_ratio: float | None = Field(default=None, ge=0)
    """Coefficient of the added SFT loss: cross-entropy of the chosen completions (`kto`: of the
    desirable ones). Unset: 1 for `orpo` and `cpo`, else 0."""

    reference_free: Annotated[bool, _used_by("sigmoid", "hinge", "ipo")] = False
    """`sigmoid`, `hinge` and `ipo`: use no reference model, as if it gave all completions the same
    probability."""

    ref_update_steps: Annotated[
        int,
        require(
            lambda steps: steps >= 1 or steps == -1,
            "{value} is not a number of steps; write -1 for never",
        ),
        NotWith(
            "preference.has_reference",
            (False,),
            why="there is no reference model to update",
            instead="leave it out",
            reads=("preference.loss_type", "preference.reference_free"),
        ),
        NotWith(
            "lora.enable_lora",
            why="with adapters the reference model is the frozen base model, which does not change",
            instead="leave it out, or write lora.enable_lora: false",
        ),
    ] = -1
    """Replace the reference model by the current model every `ref_update_steps` steps; -1: never.
    Evaluations always use the initial model as the reference. Not with adapters, whose reference is
    the base model."""

    precompute_ref_logps: Annotated[
        bool,
        require(
            bool,
            "reference log-probs are always computed before training and reused by other runs;"
            " leave precompute_ref_logps out",
        ),
    ] = True
    """Must be true: the stage `reference` computes reference log-probs before training, once for
    all runs that start from the same model."""

    length_normalize: Annotated[
        Normalization | None,
        NotWith(
            "preference.loss_type",
            tuple(sorted(AVERAGED)),
            spares=("mean",),
            why="{name}: {value} is defined with means",
            instead=f"leave it out, or use one of {', '.join(SUMMED)}",
        ),
        NotWith(
            "preference.loss_type",
            ("kto",),
            of=("pair_mean",),
            why="{name}: {value} has single completions, not pairs",
            instead="write mean or none",
        ),
    ] = None
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
        return self.loss_type not in REFERENCE_FREE and not self.reference_free

    @property
    def normalization(self) -> Normalization:
        if self.length_normalize is not None:
            return self.length_normalize
        return "mean" if self.loss_type in AVERAGED else "none"

    @property
    def sft_weight(self) -> float:
        if self.sft_loss_ratio is not None:
            return self.sft_loss_ratio
        return 1.0 if self.loss_type in WITH_SFT else 0.0

    @property
    def has_sft_loss(self) -> bool:
        return self.sft_weight > 0

    @property
    def learns_prompts(self) -> bool:
        return self.sft_weight > 0 and self.sft_loss_scope == "prompt_and_answer"

    @property
    def needs_baseline(self) -> bool:
        """Whether the loss estimates the KL divergence from the reference model over the step."""
        return self.loss_type in WITH_BASELINE


def is_used(name: str, loss: LossType) -> bool:
    """Whether the loss uses the field."""
    only_with, _ = conditions_of(PreferenceConfig, name)
    return all(loss in condition.values for condition in only_with if condition.setting == LOSS)
