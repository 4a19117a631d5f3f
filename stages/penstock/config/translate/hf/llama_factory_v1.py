"""LLaMA-Factory v1: flat files with `model`, and mappings that name plugins."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from penstock.config.loading import yaml12
from penstock.config.translate import rule, shared
from penstock.config.translate.dialect import Dialect, by_reason, same_names, typed
from penstock.config.translate.hf.training_arguments import determinism
from penstock.config.translate.shared import SOURCES, TESTS
from penstock.config.translate.templates import LLAMA_FACTORY as LLAMA_FACTORY_TEMPLATES
from penstock.config.translate.templates import chat_template
from penstock.config.translate.translation import Draft, Entry

# Keys of which its files have at least one.
SIGNATURE = ("model_class", "train_dataset", "peft_config", "dist_config", "kernel_config")
PEFT = "peft_config.name"
MUON = "optim_config.name"
CONVERTERS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "pair": "preference"}
OURS = {"path": "path", "split": "split", "size": "max_samples", "weight": "weight"}


def _sources(entry: Entry) -> None:
    # A data set, or a YAML file that describes several.
    name = TESTS if entry.key == "eval_dataset" else SOURCES
    path = str(entry.value)
    if not path.endswith((".yaml", ".yml")):
        entry.put(name, [{"path": path}])
        return
    beside = entry.draft.folder
    files = (Path(path), *(folder / path for folder in (beside, *beside.parents)))
    file = next(filter(Path.is_file, files), None)
    if file is None:
        entry.refuse(f"there is no {path}, which says where the data is and what it holds")
        return
    described = cast("dict[str, dict[str, Any]]", yaml12.parse(file.read_text("utf-8")).value)
    entry.put(name, [_source(info) for info in described.values()])
    read = {*OURS, "source", "converter"}
    if unread := {key for info in described.values() for key in info} - read:
        entry.approximated(f"{', '.join(sorted(unread))} of data sets is not read")


def _source(info: Mapping[str, Any]) -> dict[str, Any]:
    source: dict[str, Any] = {"path": info["path"]}
    if kind := CONVERTERS.get(str(info.get("converter"))):
        source["type"] = kind
    return source | {OURS[key]: info[key] for key in OURS if key in info}


def _dist(entry: Entry) -> None:
    entry.put("train.data_parallel_mode", "fsdp2")
    if entry.value != "fsdp2":
        entry.approximated("weights are sharded by FSDP2")


def _optimizer(entry: Entry) -> None:
    if entry.value not in ("muon", "adamw"):
        entry.leave_out("it takes muon and adamw")
        return
    entry.put("train.optimizer", entry.value)
    if entry.value == "muon":
        entry.put("train.muon_lr", entry.get("learning_rate", 1e-4))


def _finalize(draft: Draft) -> None:
    pairs = any(source.get("type") == "preference" for source in draft.sources(SOURCES))
    if pairs:
        draft.put("train.objective", "preference")
    method = "multipack" if draft.get("batching_strategy", "normal") != "normal" else None
    shared.lay_rows(draft, draft.get("cutoff_len"), method, pairs=pairs)


# Files with `model` and one of its own keys.
LLAMA_FACTORY_V1 = Dialect(
    name="llama-factory-v1",
    title="LLaMA-Factory v1",
    recognizes=lambda values: (
        isinstance(values.get("model"), str) and any(name in values for name in SIGNATURE)
    ),
    types=typed(
        switch="bf16",
        number="cutoff_len",
        text="train_dataset eval_dataset batching_strategy cp_mode dist_config.name",
    ),
    same={
        **same_names(
            "train.",
            "output_dir micro_batch_size global_batch_size num_train_epochs max_steps max_grad_norm"
            " seed save_steps save_epochs save_total_limit",
        ),
        "model": "model.model_path",
        "learning_rate": "train.lr",
        "enable_activation_checkpointing": "train.enable_gradient_checkpointing",
        "mp_replicate_size": "train.data_parallel_replicate_size",
        "mp_shard_size": "train.data_parallel_shard_size",
        "save_ckpt_as_hf": "train.save_hf_weights",
        "logging_steps": "train.log_interval",
        "peft_config.adapter_name_or_path": "lora.init_adapter_path",
        "optim_config.wd": "train.weight_decay",
        "optim_config.adamw_betas": "train.optimizer_kwargs.betas",
        "optim_config.adamw_eps": "train.optimizer_kwargs.eps",
        "dist_config.ep_size": "train.expert_parallel_size",
    },
    computed={
        **dict.fromkeys(("train_dataset", "eval_dataset"), _sources),
        "custom_chat_template": chat_template(LLAMA_FACTORY_TEMPLATES),
        "flash_attn": shared.attention,
        PEFT: rule.choice("lora.enable_lora", {"lora": True}, rule.refuses),
        "peft_config.r": rule.where(PEFT, "lora", then="lora.lora_rank"),
        "peft_config.lora_alpha": rule.where(PEFT, "lora", then="lora.lora_alpha"),
        "peft_config.lora_dropout": rule.where(PEFT, "lora", then="lora.lora_dropout"),
        "peft_config.use_rslora": rule.truth("lora.use_rslora"),
        "peft_config.use_dora": rule.truth("lora.use_dora"),
        "peft_config.target_modules": shared.put_targets,
        "quant_config.quantization_bit": shared.BITS,
        "dist_config.name": _dist,
        MUON: _optimizer,
        "optim_config.momentum": rule.where(MUON, "muon", then="train.muon_momentum"),
        "optim_config.nesterov": rule.where(MUON, "muon", then="train.muon_nesterov"),
        "optim_config.ns_steps": rule.where(MUON, "muon", then="train.muon_ns_steps"),
        "bf16": rule.put("train.precision", lambda on: "bf16" if on else "fp32"),
        "cutoff_len": rule.decides(shared.ROW, f"{SOURCES}.0.max_seq_len"),
        "batching_strategy": rule.decides(shared.METHOD, shared.GROUP),
        "cp_size": rule.when(
            lambda entry: entry.get("cp_mode", "ulysses") == "ulysses",
            rule.put("train.ulysses_parallel_size"),
            rule.put("train.ringattn_parallel_size"),
        ),
        "cp_mode": rule.decides("train.ulysses_parallel_size", "train.ringattn_parallel_size"),
        "full_determinism": determinism,
        "resume_from_checkpoint": rule.put("train.load_checkpoint_path"),
        "pref_loss": rule.put("preference.loss_type"),
        "pref_beta": rule.put("preference.beta"),
        "pref_ftx": rule.put("preference.sft_loss_ratio"),
        "simpo_gamma": rule.put("preference.simpo_gamma"),
        "dpo_label_smoothing": rule.put("preference.label_smoothing"),
    },
    unsupported={
        "ld_alpha": "all tokens of an answer count the same",
        "lr_scheduler_config": "write train.lr_decay_style in a native file",
    },
    idle=by_reason(
        f"""
        batching_workers dist_timeout dp_size: {shared.OF_PYTHON}
        model_class: the model's files say what it is
        trust_remote_code: model.trust_remote_code runs code of a commit
        """
    ),
    families={
        **by_reason(
            f"""
            kernel_config init_config dist_config. quant_config: {shared.OF_PYTHON}
            sample_backend max_new_tokens: of inference
            """
        ),
        "peft_config.freeze_": rule.unsupported("adapters, or all weights, are trained"),
    },
    defaults={
        "micro_batch_size": 1,
        "cutoff_len": 2048,
        "learning_rate": 1e-4,
        "num_train_epochs": 3,
        "bf16": True,
        "logging_steps": 1,
    },
    finalize=_finalize,
)
