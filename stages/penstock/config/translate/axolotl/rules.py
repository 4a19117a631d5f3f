"""Axolotl: flat files with `base_model`."""

import re
from collections.abc import Mapping
from typing import Any

from penstock.config.translate import rule, shared
from penstock.config.translate.axolotl import data
from penstock.config.translate.axolotl.reasons import FAMILIES, IDLE, UNSUPPORTED
from penstock.config.translate.dialect import Dialect, is_flat, same_names, typed
from penstock.config.translate.hf import schedule, training_arguments
from penstock.config.translate.shared import SOURCES, tracks
from penstock.config.translate.templates import AXOLOTL as AXOLOTL_TEMPLATES
from penstock.config.translate.templates import chat_template
from penstock.config.translate.translation import Draft, Entry, Rule

ON, WITH_LORA = "adapter", ("lora", "qlora")
PREFERRED = ("dpo", "ipo", "simpo", "orpo", "kto")

# Of all steps, where neither their number nor their share is written; at most 100 there.
AUTO_WARMUP = 0.03


def _adapter(entry: Entry) -> None:
    if entry.value not in (*WITH_LORA, ""):
        entry.refuse(f"it takes {', '.join(WITH_LORA)}")
        return
    entry.put("lora.enable_lora", bool(entry.value))
    if entry.value == "qlora":
        shared.quantizes("nf4")(entry)


def _few_bits(entry: Entry) -> None:
    if entry.key == "load_in_4bit" and entry.get(ON) == "qlora":
        entry.decides("lora.enable_qlora")
    elif entry.value and entry.get(ON) == "lora":
        shared.quantizes("int8" if entry.key == "load_in_8bit" else "nf4")(entry)
    else:
        entry.no_effect("base weights keep their precision unless adapters are trained on them")


def _targets(entry: Entry) -> None:
    if entry.get(ON) not in WITH_LORA:
        entry.no_effect("read with adapter: lora or qlora alone")
    elif not entry.get("lora_target_linear"):
        shared.put_targets(entry)
    else:
        entry.no_effect("lora_target_linear: true takes all")


def _least_rate(entry: Entry) -> None:
    rate = entry.get("learning_rate", 0.0)
    if isinstance(rate, int | float):
        entry.put("train.lr_min", schedule.scale_rate(rate, entry.value))
    else:
        entry.refuse("a share of learning_rate, which is no number")


# Words in the place of true, for activations that leave the GPU.
OFFLOADS = ("offload", "offload_disk", "legacy", "disk", "hidden_states", "unsloth")


def _switch(value: Any) -> bool:
    if not isinstance(value, bool) and value not in OFFLOADS:
        raise ValueError(f"it takes true, false, {', '.join(OFFLOADS)}")
    return bool(value)


def _checkpointing(entry: Entry) -> None:
    entry.put("train.enable_gradient_checkpointing", _switch(entry.value))
    if entry.value == "offload":
        entry.put("train.enable_activation_offload", True)


def _epochs_between(times_an_epoch: float) -> float:
    return 1 / times_an_epoch if times_an_epoch else 0.0


def _saves(entry: Entry) -> None:
    if entry.get("save_steps") and entry.is_assumed:
        entry.put("train.save_epochs", 0.0)
    else:
        training_arguments.savings(entry)


LANGUAGE = re.compile(r"language_model|lm_head|embed_tokens")


def _unfrozen(entry: Entry) -> None:
    # Patterns of parameters; those of the text model alone have a setting.
    patterns = list(map(str, entry.value or ()))
    if entry.get(ON):
        entry.no_effect("with adapters all of the model's own weights are frozen")
    elif any("language_model" in name for name in patterns) and all(map(LANGUAGE.search, patterns)):
        entry.put("model.freeze", ["vision", "projector"])
    elif patterns:
        entry.leave_out(
            "adapters, or all weights, are trained; model.freeze names parts of models with images"
        )
    else:
        entry.no_effect("is off")


MERGES = "lora.merge_lora_interval"


def _pruning(entry: Entry) -> None:
    # What becomes of optimizer states when ReLoRA merges.
    if not entry.get("relora"):
        entry.no_effect("read with relora: true alone")
        return
    entry.put("lora.reset_optimizer_on_merge", True)
    if entry.value != "reset":
        entry.approximated("all optimizer states of adapters are reset at a merge")


def _profile(entry: Entry) -> None:
    start = entry.get("profiler_steps_start", 0)
    entry.put("train.enable_profiling", bool(entry.value))
    entry.put("train.profile_start_step", start)
    entry.put("train.profile_end_step", start + entry.value)


def _rl(entry: Entry) -> None:
    if entry.value not in PREFERRED:
        entry.refuse(
            f"it takes {', '.join(PREFERRED)}; others generate while they train, which clients"
            " of penstock serve do"
        )
        return
    entry.put("train.objective", "preference")
    entry.put("preference.loss_type", "sigmoid" if entry.value == "dpo" else entry.value)
    # Axolotl trains with TRL's trainers.
    if entry.value == "orpo":
        # TRL 1.16's ORPO takes the cross-entropy of the chosen answer over its prompt, too.
        entry.put("preference.sft_loss_scope", "prompt_and_answer")
    elif entry.value == "kto":
        # TRL 1.16's KTO rotates the answers of a device's batch by one to estimate the KL.
        entry.put("preference.kl_pairing", "rotate")
        entry.put("preference.kl_rotation_size", entry.get("micro_batch_size", 1))


def _beta(entry: Entry) -> None:
    rl = entry.get("rl")
    if rl not in PREFERRED:
        entry.no_effect("read with rl alone")
    elif rl == "orpo":
        entry.put("preference.pref_loss_ratio", entry.value)
    else:
        entry.put("preference.beta", entry.value)


def _processor(entry: Entry) -> None:
    if entry.get(ON) or entry.get("freeze_mm_modules") or entry.get("unfrozen_parameters"):
        entry.no_effect("data with images is read with the processor of the model's files")
    else:
        entry.put("model.freeze", [])
        entry.explain("all parts of the model are trained, as there")
    if entry.value != "AutoProcessor":
        entry.approximated("the processor is that of the model's files")


def _special(entry: Entry) -> None:
    if entry.key == "special_tokens" and not isinstance(entry.value, dict):
        raise TypeError("it takes names of tokens, each with its text")
    entry.approximated("the tokenizer keeps its own; put them into its files if they differ")


def _offloading(entry: Entry) -> None:
    entry.put("train.enable_activation_offload", _switch(entry.value))
    if isinstance(entry.value, str):
        entry.explain("activations are moved to the host, in the one way there is")


def _finalize(draft: Draft) -> None:
    if draft.get("reinit_weights"):
        draft.rename("model.model_path", "model.config_path")
    packing = "multipack" if draft.get("sample_packing") else None
    pairs = draft.get("rl") in PREFERRED
    shared.lay_rows(draft, draft.get("sequence_len"), packing, pairs=pairs)
    if not draft.get("warmup_steps") and draft.get("warmup_ratio") is None:
        draft.put("train.lr_warmup_ratio", AUTO_WARMUP)
        why = f"{AUTO_WARMUP} of all steps; there at most 100"
        draft.set_line("warmup_ratio", "assumed", why, "train.lr_warmup_ratio")
    # With bf16 its normalize_config loads the weights themselves in bfloat16, too.
    shared.settle_precision(draft, "bfloat16")
    schedule.require_decay_steps(draft, "lr_scheduler")
    if not draft.value("train.use_mlflow"):
        draft.drop("train.mlflow_tracking_uri", "nothing is sent there", "approximated")
    training_arguments.settle_evaluations(draft)


SAME: Mapping[str, str] = {
    "base_model": "model.model_path",
    "base_model_config": "model.config_path",
    "tokenizer_config": "model.tokenizer_path",
    "eval_batch_size": "train.eval_micro_batch_size",
    "num_epochs": "train.num_train_epochs",
    "wandb_run_id": "train.wandb_name",
    "context_parallel_size": "train.ringattn_parallel_size",
    "sequence_parallel_degree": "train.ringattn_parallel_size",
    "dp_shard_size": "train.data_parallel_shard_size",
    "dp_replicate_size": "train.data_parallel_replicate_size",
    "lora_model_dir": "lora.init_adapter_path",
    "overrides_of_model_config": "model.foundation",
    "model_config": "model.foundation",
    "dpo_label_smoothing": "preference.label_smoothing",
    "fp8": "train.enable_fp8_training",
    "merge_lora": "export.merge_lora",
    "pretrain_multipack_attn": "data.isolate_samples",
    **same_names(
        "train.",
        "micro_batch_size wandb_name mlflow_tracking_uri tensor_parallel_size expert_parallel_size",
    ),
    **same_names(
        "data.",
        "dataset_prepared_path eval_sample_packing shuffle_merged_datasets hf_use_auth_token"
        " push_dataset_to_hub shuffle_before_merging_datasets dataset_shard_num dataset_shard_idx"
        " num_dataset_shards_to_save dataset_num_proc max_prompt_len sample_packing_sequentially"
        " sample_packing_mp_start_method pad_to_multiple_of",
    ),
}

COMPUTED: Mapping[str, Rule] = {
    "processor_type": _processor,
    "freeze_mm_modules": rule.when(
        lambda entry: not entry.value and entry.get("processor_type") is not None,
        rule.decides("model.freeze"),
        "vision tower and projector are frozen unless model.freeze says otherwise",
    ),
    **dict.fromkeys(("datasets", "test_datasets", "pretraining_dataset"), data.sources),
    "val_set_size": rule.put("data.val_set_size", lambda share: share or None),
    "sequence_len": rule.decides(shared.ROW, f"{SOURCES}.0.max_seq_len"),
    "excess_length_strategy": rule.choice(
        "data.truncation_mode", {"drop": "drop", "truncate": "keep_start"}
    ),
    "sample_packing": rule.decides(shared.METHOD, shared.GROUP),
    "train_on_inputs": rule.truth("data.train_on_prompt"),
    **dict.fromkeys(("chat_template", "chat_template_jinja"), chat_template(AXOLOTL_TEMPLATES)),
    "chat_template_kwargs": rule.put("data.chat_template_kwargs"),
    "dataset_exact_deduplication": rule.if_true(
        "data.deduplicate", "exact", otherwise="duplicates are kept"
    ),
    "curriculum_sampling": rule.if_on(shared.IN_ORDER, "samples are shuffled"),
    "streaming": rule.if_on(
        rule.approximated(
            "data is prepared once, in parts, before training; write streaming: true"
            " in a data set to keep no copy of its files"
        ),
        "data is prepared once, before training",
    ),
    "reinit_weights": rule.if_on(
        rule.decides("model.config_path"), "weights are those of base_model"
    ),
    "activation_offloading": _offloading,
    "unfrozen_parameters": _unfrozen,
    "relora": rule.if_on(rule.decides(MERGES), "is off"),
    "relora_steps": rule.when(
        lambda entry: entry.value and entry.get(ON) in WITH_LORA,
        rule.put(MERGES),
        "is off, or there are no adapters to merge",
    ),
    # The learning rate restarts, and ReLoRA merges with it.
    "jagged_restart_steps": rule.when(
        lambda entry: entry.get("relora") and entry.get(ON) in WITH_LORA,
        rule.in_turn(
            rule.put(MERGES),
            rule.approximated("adapters are merged then; the learning rate does not restart"),
        ),
        rule.left_out("the learning rate does not restart"),
    ),
    "relora_prune_method": _pruning,
    "relora_prune_ratio": _pruning,
    "rope_theta": rule.put("model.foundation.rope_theta"),
    "rope_scaling": rule.put("model.foundation.rope_scaling"),
    "float32": rule.if_true("train.precision", "fp32", otherwise="bf16 and fp16 say it"),
    "fp8_enable_fsdp_float8_all_gather": shared.gathers_8_bits,
    "precompute_ref_log_probs": shared.PRECOMPUTES,
    "dpo_loss_type": rule.where("rl", "dpo", then=shared.losses),
    "dpo_loss_weights": rule.decides("preference.pref_loss_ratio", "preference.sft_loss_ratio"),
    "trl.beta": _beta,
    "profiler_steps": _profile,
    "profiler_steps_start": rule.decides("train.profile_start_step"),
    "use_trackio": tracks("trackio"),
    "use_tensorboard": tracks("tensorboard"),
    **dict.fromkeys(
        ("reward_model", "process_reward_model"), rule.refused("models are not trained by rewards")
    ),
    "diffusion": rule.refused("models are trained from left to right alone"),
    "kd_trainer": rule.refused("models are not trained on log-probs of others"),
    "trainer_cls": rule.refused("there is one trainer"),
    "special_tokens": _special,
    ON: _adapter,
    "load_in_4bit": _few_bits,
    "load_in_8bit": _few_bits,
    **shared.of_adapters(
        ON,
        *WITH_LORA,
        lora_r="lora_rank",
        lora_alpha="lora_alpha",
        lora_dropout="lora_dropout",
        peft_use_dora="use_dora",
        peft_use_rslora="use_rslora",
        loraplus_lr_ratio="lora_plus_ratio",
    ),
    "lora_target_modules": _targets,
    "lora_target_linear": rule.where(
        ON,
        *WITH_LORA,
        then=rule.if_true(
            "lora.lora_target_modules", "all-linear", otherwise="lora_target_modules names them"
        ),
    ),
    "optimizer": schedule.optimizer,
    **{name: schedule.of_adam("optimizer") for name in (*schedule.BETAS, "adam_epsilon")},
    "lr_scheduler": schedule.schedule,
    "lr_scheduler_kwargs": schedule.schedule_arguments("lr_scheduler", "learning_rate"),
    "cosine_min_lr_ratio": _least_rate,
    "cosine_constant_lr_ratio": rule.if_on(
        rule.put("train.lr_decay_ratio", float), "the rate falls to the end of the run"
    ),
    "bfloat16": rule.if_true("train.precision", "bf16", otherwise="is off"),
    "float16": rule.if_true("train.precision", "fp16_mixed", otherwise="is off"),
    "gradient_checkpointing": _checkpointing,
    "evals_per_epoch": rule.put("train.eval_epochs", _epochs_between),
    "saves_per_epoch": rule.in_turn(
        rule.put("train.save_epochs", _epochs_between), rule.sets({"train.save_steps": 0})
    ),
    "eval_steps": rule.when(
        lambda entry: isinstance(entry.value, float) and entry.value < 1,
        lambda entry: entry.put("train.eval_epochs", entry.value * entry.get("num_epochs", 1)),
        rule.put("train.eval_steps"),
    ),
    "save_steps": rule.in_turn(rule.sets({"train.save_epochs": 0.0}), rule.put("train.save_steps")),
    "save_strategy": _saves,
    "early_stopping_patience": rule.put("train.early_stopping.patience"),
    # Rows of a step on one device.
    "batch_size": lambda entry: entry.put(
        "train.gradient_accumulation_steps",
        max(1, entry.value // entry.get("micro_batch_size", 1)),
    ),
    "eot_tokens": _special,
    "tokenizer_use_mistral_common": _special,
    "adam_eps": schedule.of_adam("optimizer"),
    "auto_resume_from_checkpoints": shared.RESUMES,
    "attn_implementation": shared.attention,
    "sdp_attention": rule.if_true("model.attn_implementation", "sdpa", otherwise=shared.BEST_HERE),
    "eager_attention": rule.if_true(
        "model.attn_implementation", "eager", otherwise=shared.BEST_HERE
    ),
    "rl": _rl,
    "rl_beta": _beta,
    "dpo_beta": _beta,
    "orpo_alpha": rule.where("rl", "orpo", then="preference.pref_loss_ratio"),
    "rpo_alpha": rule.where("rl", "dpo", then="preference.sft_loss_ratio"),
    "simpo_gamma": rule.where("rl", "simpo", then="preference.simpo_gamma"),
    "kto_desirable_weight": rule.where("rl", "kto", then="preference.desirable_weight"),
    "kto_undesirable_weight": rule.where("rl", "kto", then="preference.undesirable_weight"),
    "wandb_project": rule.in_turn(tracks("wandb"), rule.put("train.wandb_project")),
    "use_mlflow": tracks("mlflow"),
    "use_wandb": tracks("wandb"),
}

# Files with `base_model`.
AXOLOTL = Dialect(
    name="axolotl",
    title="Axolotl",
    recognizes=lambda values: is_flat(values) and "base_model" in values,
    same=SAME,
    computed=COMPUTED,
    types=typed(
        switch="sample_packing load_in_8bit load_in_4bit lora_target_linear train_on_inputs fp16"
        " auto_resume_from_checkpoints float16 bfloat16 relora save_only_model reinit_weights"
        " dataset_exact_deduplication curriculum_sampling use_wandb streaming",
        number="sequence_len",
        text="chat_template processor_type",
    ),
    unsupported=UNSUPPORTED,
    idle=IDLE,
    families=FAMILIES,
    defaults={
        "micro_batch_size": 1,
        "num_epochs": 1,
        "output_dir": "./model-out",
        "sequence_len": 512,
        "excess_length_strategy": "drop",
        "optimizer": "adamw_torch_fused",
        "lr_scheduler": "cosine",
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_drop_last": False,
        "train_on_inputs": False,
        "save_strategy": "epoch",
        "logging_steps": 1,
        "rl_beta": 0.1,
    },
    overridden_by={
        "rl_beta": ("dpo_beta", "orpo_alpha", "trl.beta"),
        "bf16": ("bfloat16", "float16"),
        "batch_size": ("gradient_accumulation_steps",),
        "save_strategy": ("saves_per_epoch",),
    },
    finalize=_finalize,
).over(training_arguments.TRAINER, "per_device_train_batch_size", "run_name", "num_train_epochs")
