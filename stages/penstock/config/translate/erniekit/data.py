"""ERNIEKit's data: sources, mixing, packing, and recipes for images (stage VL-SFT)."""

from collections.abc import Mapping
from typing import Any

from penstock.config.translate import rule
from penstock.config.translate.dialect import by_reason
from penstock.config.translate.erniekit.checkpoint import NO_EVALUATION, evaluates
from penstock.config.translate.erniekit.objective import OF_DPO_ALONE, is_preference
from penstock.config.translate.shared import ALONE, GROUP, METHOD, OF_PYTHON, has_steps
from penstock.config.translate.shared import SOURCES as TRAIN
from penstock.config.translate.shared import TESTS as TEST
from penstock.config.translate.templates import chat_template
from penstock.config.translate.translation import Draft, Entry, Rule

STAGE = "VL-SFT"


def is_of_images(entry: Entry) -> bool:
    """Whether the file is a recipe for images."""
    return entry.get("stage") == STAGE


def if_of_images(apply: Rule) -> Rule:
    """The rule of a key that recipes for images alone read."""
    return rule.when(is_of_images, apply, f"read by stage {STAGE} alone")


def _multimodal(entry: Entry) -> None:
    if entry.value and not is_of_images(entry):
        stage = entry.get("stage")
        entry.refuse(f"stage {stage} reads text; write stage: {STAGE}, or leave it out")
    else:
        entry.no_effect("data with images says it" if is_of_images(entry) else "is off")


def _freeze(entry: Entry) -> None:
    parts = str(entry.value or "").split()
    if other_parts := [part for part in parts if part != "freeze_vision"]:
        entry.refuse(f"{', '.join(other_parts)}: it takes freeze_vision")
    elif entry.get("fine_tuning") == "LoRA":
        entry.approximated(
            "with adapters all of the model's own weights are frozen, and adapters are of the"
            " language model; there the resampler has some too"
        )
    else:
        entry.put("model.freeze", ["vision"] if parts else [])


def _own_rate(entry: Entry) -> None:
    # Factors of the learning rate of routers and of the vision tower's layers.
    adapted = entry.get("fine_tuning") == "LoRA"
    frozen = "freeze_vision" in str(entry.get("freeze_config", ""))
    if adapted or (frozen and entry.key != "moe_gate_lr_ratio"):
        entry.no_effect("what it is of is frozen")
    elif entry.value == 1:
        entry.no_effect("is the rate of all parts")
    else:
        entry.refuse(
            "it is a factor of the rate of some parameters; leave it out, and write the vision"
            " tower's rate as train.vision_lr"
        )


def has_samples_alone(entry: Entry) -> bool:
    """Whether each sample has a sequence of its own, whatever `packing` says."""
    return is_of_images(entry) and bool(entry.get("one_sample_in_one_seq"))


# By stage, what their types of data are called here.
TYPES: Mapping[str, Mapping[str, str]] = {
    "SFT": {"erniekit": "sft_turns", "alpaca": "alpaca", "chatml": "chat", "messages": "chat"},
    "DPO": {
        "erniekit": "preference_turns",
        **dict.fromkeys(("alpaca", "chatml", "messages"), "preference"),
    },
    "PT": {"erniekit": "text"},
    "VL-SFT": {"erniekit": "sft_turns", "chatml": "chat", "messages": "chat"},
}

WEIGHTED = ("random", "interleave_under", "interleave_over")

# The class of their program that reads records of calls of tools.
FUNCTIONS = "FunctionCallSFTReader"


def _listed(value: Any) -> list[str]:
    return [part.strip() for part in str(value).split(",") if part.strip()]


def _numbers(value: Any) -> list[float]:
    numbers: list[float] = []
    for part in _listed(value):
        try:
            numbers.append(float(part))
        except ValueError:
            numbers.append(-1.0)
    return numbers


def _sources(entry: Entry, kind: str) -> list[dict[str, Any]]:
    # The sources of `kind` (`train`, `text` or `eval`) as entries of ours, weighted.
    paths = _listed(entry.value)
    types = _listed(entry.get(f"{kind}_dataset_type", "erniekit"))
    shares = _numbers(entry.get(f"{kind}_dataset_prob", "1.0"))
    of_stage = TYPES.get(str(entry.get("stage")), TYPES["SFT"])
    length = entry.get("max_seq_len")
    sources: list[dict[str, Any]] = []
    for index, path in enumerate(paths):
        named = types[index] if index < len(types) else types[-1] if types else "erniekit"
        source: dict[str, Any] = {"path": path, "type": of_stage.get(named, named)}
        if kind == "text" and entry.get("dataset_name") == FUNCTIONS:
            source["type"] = "chat"
        if source["type"] == "text":
            source["field_text"] = "tgt"
        if length is not None:
            source["max_seq_len"] = length
        if len(shares) == len(paths):
            source["weight"] = shares[index]
        sources.append(source)
    return sources


def _train_paths(entry: Entry) -> list[str]:
    # The sources of training; a recipe for images may have text alone.
    paths = _listed(entry.get("train_dataset_path", ""))
    return paths or (_listed(entry.get("text_dataset_path", "")) if is_of_images(entry) else [])


def _text(entry: Entry) -> None:
    # `text_dataset_path` and `text_dataset_prob`.
    if not entry.value:
        entry.no_effect("is off")
    elif _listed(entry.get("train_dataset_path", "")):
        entry.refuse("write all sources in train_dataset_path")
    elif entry.key == "text_dataset_prob":
        _of_sources(entry)
    else:
        _put_sources(entry, "text")
        if entry.get("dataset_name") != FUNCTIONS:
            entry.approximated("records are read as those of train_dataset_type erniekit")


def _put_sources(entry: Entry, kind: str) -> None:
    sources = _sources(entry, kind)
    for source in sources:
        weight = source.pop("weight", 1.0)
        if len(sources) > 1 and (entry.get("mix_strategy") in WEIGHTED or weight == 0):
            source["weight"] = weight
    entry.put(TRAIN, sources)


def _test_sources(entry: Entry) -> None:
    sources = _sources(entry, "eval")
    entry.put(TEST, [source for source in sources if source.pop("weight", 1.0) != 0])


def _of_sources(entry: Entry) -> None:
    # A key that says something of all sources of a kind.
    kind, _, name = entry.key.partition("_dataset_")
    if kind == "eval" and not evaluates(entry):
        entry.no_effect(NO_EVALUATION)
        return
    sources = len(_listed(entry.get(f"{kind}_dataset_path", "")))
    if not sources:
        entry.no_effect(f"{kind}_dataset_path names no source")
        return
    setting = "weight" if name == "prob" else name
    entry.decides(f"{TEST if kind == 'eval' else TRAIN}.0.{setting}")
    if name == "type":
        return
    if len(_listed(entry.value)) != sources:
        entry.refuse(f"{kind}_dataset_path names {sources} source(s); write a number for each")
    elif min(_numbers(entry.value), default=0) < 0:
        entry.refuse("write numbers of 0 or more, with commas between")
    elif sources == 1:
        entry.no_effect("there is one source, of which all is read")
    elif kind == "eval":
        entry.explain("every record is evaluated once; sources of share 0 are left out")
    elif entry.get("mix_strategy") not in WEIGHTED:
        entry.no_effect("mix_strategy uses every sample once, whatever its weight")


def _length(entry: Entry) -> None:
    entry.put("data.sample_packing_sequence_len", entry.value)
    if entry.get("stage") != "PT":
        entry.put("data.truncation_mode", "drop_turns")
    entry.decides(f"{TRAIN}.0.max_seq_len")


def _mix(entry: Entry) -> None:
    # `mix_strategy`, and `num_samples_each_epoch`, which one strategy reads.
    if len(_train_paths(entry)) < 2:
        entry.no_effect("one source is read whole, and again from the start in another order")
    elif entry.key == "mix_strategy":
        entry.put("data.mix_strategy", entry.value)
    elif entry.get("mix_strategy") != "random":
        entry.no_effect("read by mix_strategy random alone")
    elif not has_steps(entry):
        entry.no_effect("without max_steps an epoch has as many samples as the sources")
    else:
        entry.put("data.samples_per_epoch", entry.value)


def _greedy(entry: Entry) -> None:
    if not entry.get("packing"):
        entry.no_effect("packing is false")
    elif has_samples_alone(entry):
        entry.no_effect("one_sample_in_one_seq is true")
    elif entry.value:
        entry.put(METHOD, "greedy")
        if not entry.draft.has(GROUP):
            entry.put(GROUP, 500)
    else:
        entry.put(METHOD, "sequential")


def _prompt(entry: Entry) -> None:
    room = entry.get("max_seq_len")
    most = room - 10 if isinstance(room, int) and room > 10 else entry.value
    entry.put("data.max_prompt_len", min(entry.value, most))
    entry.explain("their program checks it and never applies it; here it is applied")


def data_is_there(draft: Draft) -> None:
    """A run needs sources: what only evaluates names those it evaluates, and what only exports
    uses the data there."""
    if draft.has(TRAIN):
        return
    if draft.has(TEST) and draft.value("train.eval_only"):
        draft.put(TRAIN, [dict(source) for source in draft.value(TEST)])
        why = "do_train is false, so the sources that are evaluated stand for those of training too"
        draft.set_line("eval_dataset_path", "approximated", why)
    elif not {"stage", "do_train", "learning_rate", "eval_dataset_path"} & draft.written.keys():
        draft.put("pipeline.stages", ["export"])
        draft.put("data.skip_prepare_dataset", True)
        draft.put(TRAIN, [{"path": "dummy"}])
        draft.drop("data.truncation_mode", "an export reads no data")
        draft.set_line(
            "output_dir",
            "approximated",
            "an export belongs to the file that trained: write export and push there",
        )


DATA: Mapping[str, Rule] = {
    "train_dataset_path": rule.when(
        lambda entry: _listed(entry.value),
        lambda entry: _put_sources(entry, "train"),
        "names no source",
    ),
    **{
        f"{kind}_dataset_{name}": _of_sources
        for kind in ("train", "eval")
        for name in ("prob", "type")
    },
    "eval_dataset_path": rule.when(evaluates, _test_sources, NO_EVALUATION),
    **dict.fromkeys(("text_dataset_path", "text_dataset_prob"), if_of_images(_text)),
    "dataset_name": if_of_images(
        rule.when(
            lambda entry: entry.value == FUNCTIONS,
            rule.decides(f"{TRAIN}.0.type"),
            "a class of their program; the types of sources say what records hold",
        )
    ),
    "chat_template": chat_template({}),
    "split_multi_turn": rule.if_on(
        rule.sets({"data.turn_rendering": "per_turn"}),
        "a conversation is one sample, of which all turns are trained",
    ),
    "input_dir": rule.refused(
        "files of token ids in Paddle's form are not read; write train_dataset_path with the texts,"
        " or translate the file and name Megatron's .bin and .idx as a source with ds_type:"
        " megatron"
    ),
    **dict.fromkeys(("dataset_type", "split"), rule.no_effect("read with input_dir alone")),
    "eval_iters": rule.no_effect(
        "read with input_dir alone; max_evaluate_steps says how many batches"
    ),
    "max_seq_len": _length,
    "mix_strategy": _mix,
    "num_samples_each_epoch": _mix,
    "random_shuffle": rule.in_turn(
        rule.put("data.shuffle_merged_datasets", bool),
        rule.put("data.shuffle_before_merging_datasets", bool),
    ),
    "packing": rule.if_on(
        rule.decides(METHOD), rule.explained(ALONE, "each sample has a sequence of its own")
    ),
    "greedy_intokens": _greedy,
    "buffer_size": rule.put(GROUP),
    "max_prompt_len": rule.when(is_preference, _prompt, OF_DPO_ALONE),
    "mask_out_eos_token": rule.when(
        is_preference, rule.put("data.mask_eos_in_loss", bool), OF_DPO_ALONE
    ),
    "distributed_dataloader": rule.no_effect(
        "every rank maps packed rows into memory, and reads its own alone"
    ),
}

IMAGES: Mapping[str, Rule] = {
    "multimodal": _multimodal,
    "freeze_config": if_of_images(_freeze),
    "modality_ratio": if_of_images(
        rule.when(
            lambda entry: entry.get("text_dataset_path") and entry.get("train_dataset_path"),
            rule.refuses("sources are mixed by train_dataset_prob; write all sources there"),
            "there are no text sources beside others with images",
        )
    ),
    "variable_resolution": if_of_images(
        rule.if_on(
            rule.no_effect("images have the size that the image processor gives them"),
            rule.refuses("one size of all images is not set here; write 1"),
        )
    ),
    "one_sample_in_one_seq": if_of_images(rule.if_on(ALONE, "packing says it")),
    "prefetch_factor": if_of_images(rule.put("data.dataloader_prefetch_factor")),
    "moe_use_aux_free_update_coef": if_of_images(
        rule.when(
            lambda entry: entry.value and entry.get("moe_use_aux_free", True),
            rule.put("train.moe_bias_update_rate", float),
            "biases of routers are left as they are",
        )
    ),
    **dict.fromkeys(("moe_gate_lr_ratio", "visual_ld", "vit_lr_ratio"), if_of_images(_own_rate)),
    "from_scratch": if_of_images(rule.refused("weights are those of model_name_or_path; write 0")),
    **{
        key: if_of_images(rule.no_effect(why))
        for key, why in by_reason(
            f"""
            moe_use_aux_free: moe_use_aux_free_update_coef says how much
            render_timestamp: of videos, which data here has none of
            use_moe moe_use_hard_gate: as the model's config.json says
            add_sys_token: the tokenizer's chat template says it
            drop_history_with_k: turns are left out where a sample is too long
            same_data: a run that goes on reads the data where it stopped
            trigger_data_prob: every record is read
            pad_to_max_seqlen: sequences are padded to whole 128 tokens, which changes no result
            use_recompute_loss_fn serialize_output gc_interval pre_alloc_memory pp_need_data
            pp_need_data_degree disable_pipeline_warmup
            save_sharding_stage1_model_include_freeze_params: {OF_PYTHON}
            """
        ).items()
    },
}
