"""NxDT: learning from preferences, and adapters."""

from collections.abc import Mapping
from typing import Any

from penstock.config.translate import rule
from penstock.config.translate.dialect import listed
from penstock.config.translate.nxdt.data import DPO, ORPO, PEFT
from penstock.config.translate.shared import PRECOMPUTES
from penstock.config.translate.translation import Draft, Entry, Rule

START = "exp_manager.resume_from_checkpoint"

# Fused layers, and what checkpoints call their parts.
TARGETS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def _loss(entry: Entry) -> None:
    entry.put("preference.loss_type", "sigmoid")
    if entry.value != "sigmoid":
        entry.approximated("the loss is sigmoid whatever this says, there too")


def _prefer(name: str, loss: str) -> Rule:
    # The rule of the one key of a strategy that weighs its loss; it chooses the strategy too.
    def apply(entry: Entry) -> None:
        strategy = entry.key.rpartition(".")[0]
        if entry.is_assumed and not _has(entry.draft, strategy):
            return
        entry.put("train.objective", "preference")
        entry.put("preference.loss_type", loss)
        entry.put(name, entry.value)
        if loss == "orpo":
            entry.approximated(
                "the SFT loss of chosen completions is a mean over tokens, not over completions"
            )

    return apply


def _has(draft: Draft, strategy: str) -> bool:
    return any(key.startswith(f"{strategy}.") for key in draft.written)


def _is_asked_for(entry: Entry) -> bool:
    return not entry.is_assumed or _has(entry.draft, PEFT)


def _adapters(entry: Entry) -> None:
    if _is_asked_for(entry):
        entry.put("lora.enable_lora", True)
        entry.put(f"lora.{entry.key.rpartition('.')[2]}", entry.value)


def _targets(entry: Entry) -> None:
    if not _is_asked_for(entry):
        return
    names = [str(name) for name in listed(entry.value)]
    parts = [part for name in names for part in TARGETS.get(name, (name,))]
    entry.put("lora.lora_target_modules", parts)
    if fused := [name for name in names if name in TARGETS]:
        entry.approximated(
            f"{', '.join(fused)}: each part has a pair A, B of its own, where fused layers share"
            " their A; start values and counts of trained parameters differ"
        )


OF_ADAPTER_FILES = "how adapters lie in NxD's own files; here they lie as peft writes them"

COMPUTED: Mapping[str, Rule] = {
    f"{DPO}.kl_beta": _prefer("preference.beta", "sigmoid"),
    f"{DPO}.loss_type": _loss,
    f"{DPO}.precompute_ref_log_probs": PRECOMPUTES,
    f"{ORPO}.beta": _prefer("preference.pref_loss_ratio", "orpo"),
    **{f"{PEFT}.lora_{name}": _adapters for name in ("rank", "alpha", "dropout", "bias")},
    f"{PEFT}.target_modules": _targets,
    f"{PEFT}.save_lora_base": rule.if_on(
        rule.no_effect("an export holds the model and the adapter"),
        rule.sets({"lora.save_lora_only": True}),
    ),
    f"{PEFT}.merge_lora": rule.when(
        lambda entry: entry.get(f"{PEFT}.save_lora_base") is not False,
        rule.put("export.merge_lora", bool),
        "save_lora_base: false keeps the adapter alone",
    ),
    f"{PEFT}.load_lora_from_ckpt": rule.when(
        lambda entry: entry.value and entry.get(START),
        rule.in_turn(
            lambda entry: entry.put("lora.init_adapter_path", entry.get(START)),
            rule.approximated("name a folder with adapter_config.json, as peft writes it"),
        ),
        "adapters are initialized from scratch",
    ),
}

# Assumed where such a strategy is written.
DEFAULTS: Mapping[str, Any] = {
    f"{DPO}.kl_beta": 0.01,
    f"{ORPO}.beta": 0.01,
    f"{PEFT}.lora_rank": 16,
    f"{PEFT}.lora_alpha": 32,
    f"{PEFT}.lora_dropout": 0.05,
    f"{PEFT}.target_modules": ["qkv_proj"],
}
