"""Invalid combinations of the objective, preference settings and data."""

from penstock.config.loading.fault import ConfigIssue
from penstock.config.rules.data import Issues
from penstock.config.schema.dataset import SCORES, Kind
from penstock.config.schema.preference import AVERAGED, USED_BY, PreferenceConfig
from penstock.config.schema.run import RunConfig

LISTS = ("datasets", "test_datasets")


def required_kind(preference: PreferenceConfig) -> Kind:
    """The kind of samples that the loss needs."""
    return "kto" if preference.loss_type == "kto" else "preference"


def _check_loss_fields(run: RunConfig) -> Issues:
    preference = run.preference
    if run.train.objective != "preference":
        return
    for name, losses in USED_BY.items():
        if not preference.is_non_default(name) or preference.loss_type in losses:
            continue
        if name == "length_normalize" and preference.length_normalize == "mean":
            continue
        takes = ", ".join(sorted(losses))
        why = f"loss_type: {preference.loss_type} does not use it"
        if name == "length_normalize" and preference.loss_type in AVERAGED:
            why = f"loss_type: {preference.loss_type} is defined with means"
        yield ConfigIssue(
            ("preference", name),
            f"{why}; leave it out, or use one of {takes}",
            ("preference.loss_type",),
        )
    if preference.loss_type == "kto" and preference.length_normalize == "pair_mean":
        yield ConfigIssue(
            ("preference", "length_normalize"),
            "loss_type: kto has single completions, not pairs; write mean or none",
            ("preference.loss_type",),
        )
    is_rotated = preference.kl_pairing == "rotate"
    if preference.kl_rotation_size and preference.loss_type == "kto" and not is_rotated:
        yield ConfigIssue(
            ("preference", "kl_rotation_size"),
            "is used with kl_pairing: rotate only; write that too, or leave it out",
            ("preference.kl_pairing",),
        )
    if not preference.pref_loss_ratio and not preference.sft_weight:
        yield ConfigIssue(
            ("preference", "pref_loss_ratio"),
            "both losses have weight 0, so nothing is trained; raise it or sft_loss_ratio",
            ("preference.sft_loss_ratio",),
        )


def _check_ref_update(run: RunConfig) -> Issues:
    preference, path = run.preference, ("preference", "ref_update_steps")
    if preference.ref_update_steps < 1 and preference.ref_update_steps != -1:
        yield ConfigIssue(
            path, f"{preference.ref_update_steps} is not a number of steps; write -1 for never"
        )
    elif preference.ref_update_steps > 0 and not preference.has_reference:
        yield ConfigIssue(
            path,
            "there is no reference model to update; leave it out",
            ("preference.loss_type", "preference.reference_free"),
        )
    elif preference.ref_update_steps > 0 and run.lora.enable_lora:
        yield ConfigIssue(
            path,
            "with adapters the reference model is the frozen base model, which does not change;"
            " leave it out, or write lora.enable_lora: false",
            ("lora.enable_lora",),
        )


def _check_data_types(run: RunConfig) -> Issues:
    objective, required = run.train.objective, required_kind(run.preference)
    for name in LISTS:
        for index, entry in enumerate(getattr(run.data, name)):
            if not entry.is_typed:
                continue
            path = ("data", name, index, "type")
            kind = entry.kind
            if objective == "pretrain" and entry.type != "text":
                yield ConfigIssue(
                    path,
                    f"{entry.type} is not plain text, and train.objective: pretrain trains on all"
                    " tokens of plain text; write type: text, or objective: sft",
                    ("train.objective",),
                )
            if objective == "preference" and kind != required:
                yield ConfigIssue(
                    path,
                    f"{entry.type} has no {_describe_kind(required)}, which train.objective:"
                    f" preference with loss_type: {run.preference.loss_type} needs; write type:"
                    f" {required}",
                    ("train.objective", "preference.loss_type"),
                )


def _check_scores(run: RunConfig) -> Issues:
    """Either all data sets have scores of both completions, or none does."""
    entries = [
        (("data", name, index), entry)
        for name in LISTS
        for index, entry in enumerate(getattr(run.data, name))
    ]
    if not any(entry.is_non_default(field) for _, entry in entries for field in SCORES):
        if run.preference.offset_alpha and run.train.objective == "preference":
            yield ConfigIssue(
                ("preference", "offset_alpha"),
                "needs scores of completions, and no data set has any; name their columns in"
                f" {' and '.join(SCORES)} of each, or leave offset_alpha out",
            )
        return
    for path, entry in entries:
        if not entry.is_typed:
            continue
        named = [field for field in SCORES if entry.is_non_default(field)]
        if entry.type != "preference":
            for field in named:
                yield ConfigIssue((*path, field), f"type {entry.type} has no scores; leave it out")
            if not named and entry.kind == "preference":
                yield ConfigIssue(
                    (*path, "type"),
                    f"{entry.type} has no scores, but other data sets have; leave this one out, or"
                    " the scores of the others",
                )
            continue
        for field in SCORES:
            if field not in named:
                yield ConfigIssue(
                    (*path, field),
                    "is not set, but other columns of scores are; name the columns of both scores"
                    " in every data set, or in none",
                )


def _describe_kind(kind: Kind) -> str:
    return "rated completions" if kind == "kto" else "preference pairs"


def _check_pretrain_eos(run: RunConfig) -> Issues:
    if run.train.objective == "pretrain" and run.data.mask_eos_in_loss:
        yield ConfigIssue(
            ("data", "mask_eos_in_loss"),
            "masks tokens, but train.objective: pretrain trains on all; leave it out",
            ("train.objective",),
        )


PREFERENCE_RULES = (
    _check_loss_fields,
    _check_ref_update,
    _check_data_types,
    _check_scores,
    _check_pretrain_eos,
)
