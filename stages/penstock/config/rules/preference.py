"""Combinations of settings of objectives that cannot be honoured."""

from penstock.config.loading.fault import ConfigIssue
from penstock.config.rules.data import Faults
from penstock.config.schema.dataset import SCORES, Kind
from penstock.config.schema.preference import AVERAGED, USED_BY, PreferenceConfig
from penstock.config.schema.run import RunConfig

OF_TOKENS = ("label_smoothing", "z_loss_coef")
"""Terms of the loss of tokens, which preferences do not have."""

LISTS = ("datasets", "test_datasets")


def wanted_kind(preference: PreferenceConfig) -> Kind:
    """The data that a loss takes."""
    return "kto" if preference.loss_type == "kto" else "preference"


def _preferences_are_learnt(run: RunConfig) -> Faults:
    if run.train.objective == "preference":
        return
    for name in PreferenceConfig.model_fields:
        if run.preference.asks_for(name):
            yield ConfigIssue(
                ("preference", name),
                f"nothing reads it with train.objective: {run.train.objective}; write train."
                f"objective: preference, or leave {name} out",
                ("train.objective",),
            )


def _losses_use_what_is_written(run: RunConfig) -> Faults:
    preference = run.preference
    if run.train.objective != "preference":
        return
    for name, losses in USED_BY.items():
        if not preference.asks_for(name) or preference.loss_type in losses:
            continue
        if name == "length_normalize" and preference.length_normalize == "mean":
            continue
        takes = ", ".join(sorted(losses))
        why = f"loss_type: {preference.loss_type} does not use it"
        if name == "length_normalize" and preference.loss_type in AVERAGED:
            why = f"loss_type: {preference.loss_type} is defined on means"
        yield ConfigIssue(
            ("preference", name),
            f"{why}; leave it out, or take one of {takes}",
            ("preference.loss_type",),
        )
    if preference.loss_type == "kto" and preference.length_normalize == "pair_mean":
        yield ConfigIssue(
            ("preference", "length_normalize"),
            "answers that are judged one by one make no pairs; write mean or none",
            ("preference.loss_type",),
        )
    if preference.asks_for("sft_loss_scope") and not preference.sft_weight:
        yield ConfigIssue(
            ("preference", "sft_loss_scope"),
            "there is no cross-entropy without sft_loss_ratio; write that too, or leave it out",
            ("preference.sft_loss_ratio", "preference.loss_type"),
        )
    is_rotated = preference.kl_pairing == "rotate"
    if preference.kl_rotation_size and preference.loss_type == "kto" and not is_rotated:
        yield ConfigIssue(
            ("preference", "kl_rotation_size"),
            "is read with kl_pairing: rotate alone; write that too, or leave it out",
            ("preference.kl_pairing",),
        )
    if not preference.pref_loss_ratio and not preference.sft_weight:
        yield ConfigIssue(
            ("preference", "pref_loss_ratio"),
            "with a weight of 0 for both losses nothing is learnt; raise it or sft_loss_ratio",
            ("preference.sft_loss_ratio",),
        )


def _references_can_move(run: RunConfig) -> Faults:
    preference, path = run.preference, ("preference", "ref_update_steps")
    if preference.ref_update_steps < 1 and preference.ref_update_steps != -1:
        yield ConfigIssue(
            path, f"{preference.ref_update_steps} is no number of steps; write -1 for never"
        )
    elif preference.ref_update_steps > 0 and not preference.has_reference:
        yield ConfigIssue(
            path,
            "there is no reference model to be replaced; leave it out",
            ("preference.loss_type", "preference.reference_free"),
        )
    elif preference.ref_update_steps > 0 and run.lora.enable_lora:
        yield ConfigIssue(
            path,
            "the reference of a model with adapters is what is beneath them, which does not move;"
            " leave it out, or write lora.enable_lora: false",
            ("lora.enable_lora",),
        )


def _preferences_have_one_loss(run: RunConfig) -> Faults:
    if run.train.objective != "preference":
        return
    for name in OF_TOKENS:
        if run.train.asks_for(name):
            yield ConfigIssue(
                ("train", name),
                "is a term of the loss of tokens, and train.objective is preference; leave it out",
                ("train.objective",),
            )


def _data_serve_the_objective(run: RunConfig) -> Faults:
    objective, wanted = run.train.objective, wanted_kind(run.preference)
    for name in LISTS:
        for index, entry in enumerate(getattr(run.data, name)):
            if not entry.is_typed:
                continue
            path = ("data", name, index, "type")
            kind = entry.kind
            if objective == "pretrain" and entry.type != "text":
                yield ConfigIssue(
                    path,
                    f"{entry.type} is no plain text, and train.objective: pretrain trains on every"
                    " token of texts; write type: text, or objective: sft",
                    ("train.objective",),
                )
            if objective == "preference" and kind != wanted:
                yield ConfigIssue(
                    path,
                    f"{entry.type} holds no {_called(wanted)}, which train.objective: preference"
                    f" with loss_type: {run.preference.loss_type} learns from; write type:"
                    f" {wanted}",
                    ("train.objective", "preference.loss_type"),
                )


def _scores_are_whole(run: RunConfig) -> Faults:
    """Every data set says of both answers how good they are, or none does."""
    entries = [
        (("data", name, index), entry)
        for name in LISTS
        for index, entry in enumerate(getattr(run.data, name))
    ]
    if not any(entry.asks_for(field) for _, entry in entries for field in SCORES):
        if run.preference.offset_alpha and run.train.objective == "preference":
            yield ConfigIssue(
                ("preference", "offset_alpha"),
                "goes by the scores of answers, and no data set has any; name their columns in"
                f" {' and '.join(SCORES)} of each, or leave offset_alpha out",
            )
        return
    for path, entry in entries:
        if not entry.is_typed:
            continue
        named = [field for field in SCORES if entry.asks_for(field)]
        if entry.type != "preference":
            for field in named:
                yield ConfigIssue((*path, field), f"type {entry.type} has no scores; leave it out")
            if not named and entry.kind == "preference":
                yield ConfigIssue(
                    (*path, "type"),
                    f"{entry.type} has no scores, and other data sets have; leave this one out, or"
                    " the scores of the others",
                )
            continue
        for field in SCORES:
            if field not in named:
                yield ConfigIssue(
                    (*path, field),
                    "is not named, and others are; name the columns with the scores of both"
                    " answers in every data set, or in none",
                )


def _called(kind: Kind) -> str:
    return "judged answers" if kind == "kto" else "pairs of answers"


def _every_token_of_a_text_is_trained(run: RunConfig) -> Faults:
    if run.train.objective == "pretrain" and run.data.mask_eos_in_loss:
        yield ConfigIssue(
            ("data", "mask_eos_in_loss"),
            "leaves out tokens, and train.objective: pretrain trains on all; leave it out",
            ("train.objective",),
        )


PREFERENCE_RULES = (
    _preferences_are_learnt,
    _losses_use_what_is_written,
    _references_can_move,
    _preferences_have_one_loss,
    _data_serve_the_objective,
    _scores_are_whole,
    _every_token_of_a_text_is_trained,
)
