"""Rules for models, adapters and packing that tools around Hugging Face's libraries share."""

import re
from importlib.util import find_spec
from typing import Any

from penstock.config.translate import rule
from penstock.config.translate.dialect import listed
from penstock.config.translate.translation import Draft, Entry, Rule

SOURCES, TESTS = "data.datasets", "data.test_datasets"
ROW, GROUP = "data.sample_packing_sequence_len", "data.sample_packing_group_size"
METHOD = "data.sample_packing_method"

FLASH = (
    *("flash_attention_2", "flash_attention_3", "fa2", "fa3", "auto", "xformers"),
    "flex_attention",
)
PLAIN = {"sdpa": "sdpa", "eager": "eager", "disabled": "eager"}

REGEX_SIGNS = re.compile(r"[\\()\[\]|*+?^$]")
BESIDE_ADAPTERS = (
    "whole layers beside adapters are not trained; lora_target_modules may name embed_tokens and"
    " lm_head"
)
OF_PYTHON = "how the program does its work, which changes no result"
SIZED = "images are resized as preprocessor_config.json of the model says; write its size there"
BEST_HERE = "the best attention backend on this machine is used, FlashAttention if installed"


def attention(entry: Entry) -> None:
    """An attention implementation of transformers, or a kernel of the hub."""
    name = str(entry.value)
    if name in PLAIN:
        entry.put("model.attn_implementation", PLAIN[name])
    elif name in FLASH or "flash" in name:
        entry.no_effect(BEST_HERE)
    else:
        entry.leave_out(f"it takes {', '.join((*PLAIN, *FLASH))}, and flash kernels of the hub")


def names_in(value: Any) -> list[str]:
    """A list of names, or comma-separated names."""
    return [name.strip() for item in listed(value) for name in str(item).split(",") if name.strip()]


def put_targets(entry: Entry) -> None:
    """`target_modules` of PEFT; `all` and `all-linear` are all linear layers except the LM head.
    Text is a regular expression, and of names those that the model lacks are passed over."""
    if not all(isinstance(name, str) for name in listed(entry.value)):
        raise ValueError("it takes names")
    if isinstance(entry.value, str) and REGEX_SIGNS.search(entry.value):
        entry.put("lora.lora_target_modules", [f"re:{entry.value}"])
    elif entry.value in ("all", "all-linear"):
        entry.put("lora.lora_target_modules", "all-linear")
    else:
        names = names_in(entry.value)
        entry.put("lora.lora_target_modules", names)
        # PEFT raises only if no name at all is of a layer.
        if names[1:]:
            entry.assume("lora.missing_targets", "skip", "PEFT passes over names of other models")


# Samples stay in the order of their files.
IN_ORDER = rule.sets(
    {"data.shuffle_merged_datasets": False, "data.shuffle_before_merging_datasets": False}
)

# Rule of what asks for a sequence of its own for each sample.
ALONE = rule.sets({METHOD: "multipack", GROUP: 1})


def quantizes(kind: str) -> Rule:
    """Rule of what asks for base weights in this format."""
    return rule.sets({"lora.enable_qlora": True, "lora.quant_format": kind})


# Rule of a number of bits of base weights; raises LookupError for another than these.
BITS = rule.in_turn(
    rule.sets({"lora.enable_qlora": True}),
    rule.put("lora.quant_format", {4: "nf4", 8: "int8"}.__getitem__),
)


def in_few_bits(kind: str) -> Rule:
    """Rule of a boolean that asks for quantized base weights."""
    return rule.if_on(quantizes(kind), "base weights keep their precision")


def of_adapters(key: str, *values: Any, **names: str) -> dict[str, Rule]:
    """Rules of settings of adapters, by their keys, which are read where `key` has one of `values`:
    `lora_r="lora_rank"`."""
    return {
        foreign: rule.where(key, *values, then=f"lora.{name}") for foreign, name in names.items()
    }


def lay_rows(draft: Draft, longest: Any, packing: str | None, *, pairs: bool) -> None:
    """Set truncation to `longest` tokens and packing to `packing`; None: one sample per sequence.

    A pair is a sequence with its prompt and both completions, each of which may be that long.
    `wrapped` text is one stream: no document is truncated, and tokens attend to all that is before
    them.
    """
    if packing == "wrapped":
        draft.put("data.isolate_samples", False)
    elif isinstance(longest, int):
        for source in (*draft.sources(SOURCES), *draft.sources(TESTS)):
            source.setdefault("max_seq_len", longest)
        draft.placeholders[SOURCES] = [{"path": "data/train.jsonl", "max_seq_len": longest}]
    if isinstance(longest, int):
        draft.put(ROW, 2 * longest if pairs else longest)
    draft.put(METHOD, packing or "multipack")
    if packing is None:
        draft.put(GROUP, 1)


def has_steps(entry: Entry) -> bool:
    """Whether the file says how many steps a run has (`max_steps`)."""
    steps = entry.get("max_steps")
    return isinstance(steps, int) and steps > 0


def settle_precision(draft: Draft, weights: Any) -> None:
    """Weights loaded in bfloat16 are trained in bfloat16, except beside adapters, which are in
    float32."""
    is_whole = not draft.value("lora.enable_lora")
    is_mixed = draft.value("train.precision") == "bf16_mixed"
    # The trainer's autocast keeps the dtype of the weights, and PEFT casts adapters to float32.
    if weights in ("bfloat16", "bf16") and is_whole and is_mixed:
        draft.put("train.precision", "bf16")


# Losses of TRL and LLaMA-Factory that have the same names here.
LOSSES = ("sigmoid", "hinge", "ipo", "kto_pair", "nca_pair", "sppo_hard", "orpo", "simpo")


def losses(entry: Entry) -> None:
    """`loss_type`: a preference loss, or several, of which cross-entropy may be one, with the
    weights in `loss_weights`."""
    names = names_in(entry.value)
    loss_weights = entry.get(entry.key.replace("type", "weights")) or [1.0] * len(names)
    weights = dict(zip(names, listed(loss_weights), strict=False))
    chosen = [name for name in names if name != "sft"]
    if len(chosen) != 1 or chosen[0] not in LOSSES or len(weights) != len(names):
        entry.refuse(f"one of {', '.join(LOSSES)} is taken, with sft beside it if it is wanted")
        return
    entry.put("preference.loss_type", chosen[0])
    if "sft" in weights:
        entry.put("preference.sft_loss_ratio", float(weights["sft"]))
    if weights[chosen[0]] != 1.0:
        entry.put("preference.pref_loss_ratio", float(weights[chosen[0]]))


def gathers_8_bits(entry: Entry) -> None:
    """`fp8_enable_fsdp_float8_all_gather`."""
    if entry.value and entry.get("fp8"):
        entry.put("train.enable_fp8_all_gather", True)
        entry.put("train.fp8.recipe", "tensorwise")
    else:
        entry.no_effect("weights are gathered as they are kept")


# Rule of a boolean that asks for reference log-probs before training.
PRECOMPUTES = rule.if_true(
    "preference.precompute_ref_logps",
    value=True,
    otherwise="they are always computed before training, and reused by other runs",
)

# Rule of a boolean that asks to resume from the newest checkpoint.
RESUMES = rule.if_true("train.load_checkpoint_path", "auto", otherwise="nothing is resumed")

TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio")
NO_TRACKER = f"no tracker here ({', '.join(TRACKERS)}); metrics.jsonl has all metrics"
EVENTS = "train.use_tensorboard"


def track(entry: Entry, tracker: str) -> None:
    """Enable a tracker, or report that its package is missing.

    Other tools continue without the tracker, so a run here must not fail for it.
    """
    if find_spec(tracker) is not None:
        entry.put(f"train.use_{tracker}", True)
    else:
        entry.approximated(
            f"{tracker} is not installed here: pip install 'penstock[{tracker}]', and translate"
            " again; metrics.jsonl and report.html are written anyway"
        )


def tracks(tracker: str) -> Rule:
    """Rule of a boolean that enables a tracker."""
    off = rule.sets({f"train.use_{tracker}": False})
    return rule.if_on(lambda entry: track(entry, tracker), off)


def reports(entry: Entry) -> None:
    """`report_to`: one tracker, several, `all` or `none`."""
    if not all(isinstance(name, str) for name in listed(entry.value)):
        raise ValueError("it takes names")
    trackers = [name for name in listed(entry.value) if name != "none"]
    if not trackers:
        entry.put("train.use_wandb", False)
    for name in trackers:
        if name in TRACKERS:
            track(entry, name)
            if name == "tensorboard" and entry.get("logging_dir") and entry.draft.value(EVENTS):
                entry.put("train.log_dir", entry.get("logging_dir"))
        else:
            entry.approximated(f"{name} is not supported; there are {', '.join(TRACKERS)}")


def events_folder(entry: Entry) -> None:
    """`logging_dir`: the folder of TensorBoard's event files."""
    if "tensorboard" in listed(entry.get("report_to")):
        entry.decides("train.log_dir")
    else:
        entry.no_effect("read with report_to: tensorboard alone")
