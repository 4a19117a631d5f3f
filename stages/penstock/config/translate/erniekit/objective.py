"""ERNIEKit's recipes: objective and trained weights."""

from collections.abc import Mapping
from typing import Any, cast

from penstock.config.schema.preference import AVERAGED, REFERENCE_FREE, LossType, is_used
from penstock.config.translate import rule
from penstock.config.translate.dialect import Values, same_names
from penstock.config.translate.translation import Draft, Entry, Rule

OBJECTIVES = {"SFT": "sft", "DPO": "preference", "PT": "pretrain", "VL-SFT": "sft"}

# Keys that only DPO reads.
OF_DPO = (
    *("beta", "simpo_gamma", "offset_alpha", "max_prompt_len", "loss_type", "pref_loss_ratio"),
    *("sft_loss_ratio", "label_smoothing", "reference_free", "ref_model_update_steps"),
    *("dpop_lambda", "normalize_logps", "mask_out_eos_token"),
)


def infer_stage(values: Values) -> Values:
    """The stage of a file that writes none: their documentation has no such key, and a file of DPO
    is known by the keys of DPO."""
    return {"stage": "DPO"} if any(key in values for key in OF_DPO) else {}


def _stage(entry: Entry) -> None:
    stage = str(entry.value)
    if stage in OBJECTIVES:
        entry.put("train.objective", OBJECTIVES[stage])
        if entry.is_assumed and stage == "DPO":
            written = next(key for key in OF_DPO if key in entry.draft.written)
            entry.explain(f"{written} is written, which only DPO reads; for SFT write stage: SFT")
    else:
        entry.refuse(f"recipes for {', '.join(OBJECTIVES)} are translated")


OF_DPO_ALONE = "read by stage DPO alone"


def is_preference(entry: Entry) -> bool:
    """Whether the file is a recipe for preference pairs."""
    return entry.get("stage") == "DPO"


def _loss(entry: Entry) -> None:
    entry.put("preference.loss_type", entry.value)
    if entry.value == "dpop":
        entry.put("preference.dpop_penalty", "outside")


def _number(entry: Entry) -> None:
    # A number that some losses read.
    loss = cast("LossType", entry.get("loss_type"))
    if is_used(entry.key, loss):
        entry.put(f"preference.{entry.key}", float(entry.value))
    else:
        entry.no_effect(f"loss_type {loss} does not read it")


def _sft_ratio(entry: Entry) -> None:
    if entry.get("loss_type") == "orpo":
        entry.no_effect("loss_type orpo has a ratio of 1")
    else:
        _number(entry)


def _normalized(entry: Entry) -> None:
    if (loss := entry.get("loss_type")) in AVERAGED:
        entry.no_effect(f"loss_type {loss} is defined on means")
    else:
        entry.put("preference.length_normalize", "pair_mean" if entry.value else "none")


def _without_reference(entry: Entry) -> None:
    loss = entry.get("loss_type")
    if loss in REFERENCE_FREE:
        entry.no_effect(f"loss_type {loss} has no reference model")
    elif entry.value and not is_used("reference_free", loss):
        entry.refuse(f"loss_type {loss} needs a reference model")
    elif is_used("reference_free", loss):
        entry.put("preference.reference_free", bool(entry.value))
    else:
        entry.no_effect("is off")


def _update_reference(entry: Entry) -> None:
    if not is_preference(entry) or entry.value <= 0:
        entry.no_effect("the reference model stays what it is")
    elif _is_lora(entry.draft):
        entry.no_effect("with LoRA the reference is the base model, which stays what it is")
    elif entry.get("loss_type") in REFERENCE_FREE or entry.get("reference_free"):
        entry.no_effect("there is no reference model")
    else:
        entry.put("preference.ref_update_steps", entry.value)
        entry.explain("in optimizer steps, as documented; their program counts micro-batches")


def _is_lora(draft: Draft) -> bool:
    written = draft.written
    return written["fine_tuning"] == "LoRA" if "fine_tuning" in written else bool(draft.get("lora"))


OF_LORA = {
    **same_names("", "lora_rank lora_alpha"),
    "rslora": "use_rslora",
    "lora_plus_scale": "lora_plus_ratio",
    "lora_path": "init_adapter_path",
}


def _lora(entry: Entry) -> None:
    if not _is_lora(entry.draft):
        entry.no_effect("no adapters are trained")
    elif entry.get("rslora_plus") and entry.key != "lora_rank":
        entry.no_effect("rslora_plus decides it")
    else:
        entry.put(f"lora.{OF_LORA[entry.key]}", entry.value)
    if entry.key == "lora_alpha" and entry.value == -1 and entry.line.names:
        root = bool(entry.get("rslora"))
        entry.put("lora.lora_alpha", 4 if root else 2 * entry.get("lora_rank"))
        entry.explain("-1 is 4 with rslora" if root else "-1 is twice the rank")


def adapters_are_whole(draft: Draft) -> None:
    """What only adapters can be trained beside needs adapters."""
    if draft.value("lora.enable_qlora") and not draft.value("lora.enable_lora"):
        key = next(key for key in ("compute_type", "weight_quantize_algo") if key in draft.written)
        value: Any = draft.get(key)
        draft.set_line(key, "refused", f"{value} weights stay as they are; write fine_tuning: LoRA")


OBJECTIVE: Mapping[str, Rule] = {
    "stage": _stage,
    "loss_type": rule.when(is_preference, _loss, OF_DPO_ALONE),
    **dict.fromkeys(
        ("beta", "simpo_gamma", "label_smoothing", "pref_loss_ratio", "dpop_lambda"),
        rule.when(is_preference, _number, OF_DPO_ALONE),
    ),
    "offset_alpha": rule.when(
        lambda entry: is_preference(entry) and entry.value,
        rule.refuses(
            "needs a score for each answer, and their data carry none; write 0, or translate the"
            " file and write preference.offset_alpha with field_chosen_score and"
            " field_rejected_score of the data"
        ),
        "is off",
    ),
    "sft_loss_ratio": rule.when(is_preference, _sft_ratio, OF_DPO_ALONE),
    "normalize_logps": rule.when(is_preference, _normalized, OF_DPO_ALONE),
    "reference_free": rule.when(is_preference, _without_reference, OF_DPO_ALONE),
    "ref_model_update_steps": _update_reference,
    "fine_tuning": rule.choice("lora.enable_lora", {"LoRA": True, "Full": False}, rule.refuses),
    "lora": rule.truth("lora.enable_lora"),
    **dict.fromkeys(OF_LORA, _lora),
    "rslora_plus": rule.if_on(
        rule.when(
            lambda entry: _is_lora(entry.draft),
            rule.sets({"lora.use_rslora": True, "lora.lora_plus_ratio": 4.0, "lora.lora_alpha": 4}),
            "no adapters are trained",
        ),
        "is off",
    ),
}
