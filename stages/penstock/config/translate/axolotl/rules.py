"""Axolotl: flat files with `base_model`."""

from collections.abc import Mapping

from penstock.config.translate import shared
from penstock.config.translate.axolotl import data
from penstock.config.translate.dialect import (
    Dialect,
    Rule,
    Values,
    decides,
    is_flat,
    no_effect,
    truth,
    where,
)
from penstock.config.translate.hf import schedule, training_arguments
from penstock.config.translate.shared import (
    SOURCES,
    TESTS,
    lay_rows,
    settle_precision,
    tracks,
)
from penstock.config.translate.translation import Draft, Entry

ON, WITH_LORA = "adapter", ("lora", "qlora")
PREFERRED = ("dpo", "ipo", "simpo", "orpo", "kto")
LOSS_OF = {"dpo": "sigmoid", "ipo": "ipo", "simpo": "simpo", "orpo": "orpo", "kto": "kto"}

AUTO_WARMUP = 0.03
"""Of all steps, where neither their number nor their share is written; at most 100 there."""


def _recognizes(values: Values) -> bool:
    return is_flat(values) and "base_model" in values


def _adapter(entry: Entry) -> None:
    if entry.value not in (*WITH_LORA, ""):
        entry.refuse(f"it takes {', '.join(WITH_LORA)}")
        return
    entry.put("lora.enable_lora", bool(entry.value))
    if entry.value == "qlora":
        entry.put("lora.enable_qlora", True)
        entry.put("lora.quant_format", "nf4")


def _few_bits(entry: Entry) -> None:
    if entry.key == "load_in_4bit" and entry.get(ON) == "qlora":
        entry.decides("lora.enable_qlora")
    elif entry.value and entry.get(ON) == "lora":
        kind = "int8" if entry.key == "load_in_8bit" else "nf4"
        shared.in_few_bits(kind)(entry)
    else:
        entry.no_effect("base weights keep their precision unless adapters are trained on them")


def _targets(entry: Entry) -> None:
    if entry.get(ON) not in WITH_LORA:
        entry.no_effect("read with adapter: lora or qlora alone")
    elif entry.key == "lora_target_linear":
        if entry.value:
            entry.put("lora.lora_target_modules", "all-linear")
        else:
            entry.no_effect("lora_target_modules names them")
    elif not entry.get("lora_target_linear"):
        entry.put("lora.lora_target_modules", shared.targets(entry.value))
    else:
        entry.no_effect("lora_target_linear: true takes all")


def _precision(entry: Entry) -> None:
    """`bf16` and `fp16` beside weights in as many bits; `bfloat16` and `float16` alone."""
    if entry.key in ("bfloat16", "float16") and entry.value:
        kind = "bf16" if entry.key == "bfloat16" else "fp16_mixed"
        entry.put("train.precision", kind)
    elif entry.key in ("bfloat16", "float16"):
        entry.no_effect("is off")
    else:
        training_arguments.in_bits(entry)


def _least_rate(entry: Entry) -> None:
    rate = entry.get("learning_rate", 0.0)
    if isinstance(rate, int | float):
        entry.put("train.lr_min", schedule.scale_rate(rate, entry.value))
    else:
        entry.refuse("a share of learning_rate, which is no number")


def _constant_ratio(entry: Entry) -> None:
    if entry.value:
        entry.put("train.lr_decay_ratio", float(entry.value))
    else:
        entry.no_effect("the rate falls to the end of the run")


def _in_steps(entry: Entry) -> None:
    """Rows of a step on one device."""
    rows, unit = entry.value, entry.get("micro_batch_size", 1)
    if "gradient_accumulation_steps" in entry.draft.written:
        entry.no_effect("gradient_accumulation_steps is written, and overrides it")
    else:
        entry.put("train.gradient_accumulation_steps", max(1, rows // unit))


def _checkpointing(entry: Entry) -> None:
    entry.put("train.enable_gradient_checkpointing", bool(entry.value))
    if entry.value == "offload":
        entry.put("train.enable_activation_offload", True)


def _a_share_of_epochs(kind: str) -> Rule:
    """So many times an epoch."""

    def rule(entry: Entry) -> None:
        entry.put(f"train.{kind}_epochs", 1 / entry.value if entry.value else 0.0)
        if kind == "save":
            entry.put("train.save_steps", 0)

    return rule


def _saves(entry: Entry) -> None:
    if "saves_per_epoch" in entry.draft.written:
        entry.no_effect("saves_per_epoch is written, and overrides it")
    elif entry.get("save_steps") and entry.is_assumed:
        entry.put("train.save_epochs", 0.0)
    else:
        training_arguments.savings(entry)


def _save_steps(entry: Entry) -> None:
    entry.put("train.save_epochs", 0.0)
    entry.put("train.save_steps", entry.value)


def _eval_steps(entry: Entry) -> None:
    if isinstance(entry.value, float) and entry.value < 1:
        entry.put("train.eval_epochs", entry.value * entry.get("num_epochs", 1))
    else:
        entry.put("train.eval_steps", entry.value)


def _held_out(entry: Entry) -> None:
    entry.put("data.val_set_size", entry.value or None)


def _rl(entry: Entry) -> None:
    if entry.value not in PREFERRED:
        entry.refuse(f"it takes {', '.join(PREFERRED)}")
        return
    entry.put("train.objective", "preference")
    entry.put("preference.loss_type", LOSS_OF[str(entry.value)])
    # Axolotl trains with TRL's trainers.
    if entry.value == "orpo":
        entry.put("preference.sft_loss_scope", "prompt_and_answer")
    elif entry.value == "kto":
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


def _attends(implementation: str) -> Rule:
    def rule(entry: Entry) -> None:
        if entry.value:
            entry.put("model.attn_implementation", implementation)
        else:
            entry.no_effect(shared.BEST_HERE)

    return rule


def _processor(entry: Entry) -> None:
    if entry.value != "AutoProcessor":
        entry.refuse("it takes AutoProcessor: the processor is that of the model's files")
    elif entry.get(ON) or entry.get("freeze_mm_modules"):
        entry.no_effect("data with images is read with the processor of the model's files")
    else:
        entry.put("model.freeze", [])
        entry.explain("all parts of the model are trained, as there")


def _frozen_images(entry: Entry) -> None:
    if entry.value or entry.get("processor_type") is None:
        entry.no_effect("vision tower and projector are frozen unless model.freeze says otherwise")
    else:
        entry.decides("model.freeze")


def _special(entry: Entry) -> None:
    entry.approximated("the tokenizer keeps its own; put them into its files if they differ")


def _project(entry: Entry) -> None:
    tracks("wandb")(entry)
    entry.put("train.wandb_project", entry.value)


def _finalize(draft: Draft) -> None:
    packing = "multipack" if draft.get("sample_packing") else None
    pairs = draft.get("rl") in PREFERRED
    longest = draft.get("sequence_len")
    lay_rows(draft, longest, packing, pairs=pairs)
    if not draft.get("warmup_steps") and draft.get("warmup_ratio") is None:
        draft.put("train.lr_warmup_ratio", AUTO_WARMUP)
        why = f"{AUTO_WARMUP} of all steps; there at most 100"
        draft.set_line("warmup_ratio", "assumed", why)
        draft.lines["warmup_ratio"].names.append("train.lr_warmup_ratio")
    settle_precision(draft, "bfloat16")
    schedule.require_decay_steps(draft, "lr_scheduler")
    if not draft.value("train.use_mlflow"):
        draft.drop("train.mlflow_tracking_uri", "nothing is sent there", "approximated")
    training_arguments.settle_evaluations(draft)


OF_KERNELS = "fused kernels are taken wherever they serve"
OF_OTHERS = "how the program does its work, which changes no result"

IDLE: Mapping[str, str] = {
    **training_arguments.IDLE,
    **dict.fromkeys(
        (
            *("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_layer_norm"),
            *("liger_fused_linear_cross_entropy", "liger_cross_entropy", "cut_cross_entropy"),
            *("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "plugins"),
            *("liger_rms_norm_gated", "use_kernels", "use_scattermoe", "use_sonicmoe"),
            *("experts_implementation", "fused_attn_kernel"),
            *("flash_attn_cross_entropy", "flash_attn_rms_norm", "flash_attn_fuse_mlp"),
        ),
        OF_KERNELS,
    ),
    **dict.fromkeys(
        (
            *("strict", "is_llama_derived_model", "is_mistral_derived_model", "debug"),
            *("model_type", "tokenizer_type", "tokenizer_use_fast", "wandb_log_model"),
            *("loss_watchdog_threshold", "loss_watchdog_patience", "gc_steps", "use_tensorboard"),
            *("fsdp_version", "torchdistx_path", "experimental_skip_move_to_device"),
            *("max_packed_sequence_len", "gptq_groupsize", "gptq_model_v1"),
            *("lora_model_dir_is_local", "sample_packing_bin_size", "save_first_step"),
        ),
        OF_OTHERS,
    ),
    "pad_to_sequence_len": "rows are padded to whole 128 tokens, which changes no result",
    "group_by_length": "rows have no padding to save",
    "sample_packing_group_size": "all samples are packed together",
    "quantize_moe_experts": "adapter: qlora quantizes experts too",
    "lora_fan_in_fan_out": "a form of layers that no family here has",
    "dataset_processes": "how samples are prepared, which changes none",
    **dict.fromkeys(("flash_attention", "flex_attention", "xformers_attention"), shared.BEST_HERE),
    "wandb_watch": "gradients are logged by train.log_grad_norm",
    "wandb_entity": "a login says it: set WANDB_ENTITY in the environment",
    "load_best_model_at_end": "write train.save_best in a native file",
}

SIZED = "images are resized as preprocessor_config.json of the model says; write its size there"

REFUSED: Mapping[str, str] = {
    **training_arguments.REFUSED,
    "lora_modules_to_save": "whole layers beside adapters are not trained",
    "peft_layers_to_transform": "name layers by patterns in lora_target_modules",
    "unfrozen_parameters": "adapters, or all weights, are trained",
    "tokens": "the vocabulary is that of the checkpoint",
    "added_tokens_overrides": "the vocabulary is that of the checkpoint",
    "resize_token_embeddings_to_32x": "the vocabulary is that of the checkpoint",
    "relora_steps": "write lora.merge_lora_interval in a native file",
    "s2_attention": "documents are attended to whole",
    "noisy_embedding_alpha": "no noise is added to embeddings",
    "rope_theta": "write model.foundation in a native file",
    "overrides_of_model_config": "write model.foundation in a native file",
    "reward_model": "models are not trained by rewards",
    "image_size": SIZED,
    "image_resize_algorithm": SIZED,
    "lora_target_parameters": "name layers in lora_target_modules",
    "gptq": "base weights are quantized as they are read: write adapter: qlora",
    "min_sample_len": "short samples are trained as others are",
}

SAME: Mapping[str, str] = {
    **{
        name: ours
        for name, ours in training_arguments.SAME.items()
        if name not in ("gradient_checkpointing", "per_device_train_batch_size", "run_name")
    },
    "base_model": "model.model_path",
    "base_model_config": "model.config_path",
    "tokenizer_config": "model.tokenizer_path",
    "dataset_prepared_path": "data.dataset_prepared_path",
    "eval_sample_packing": "data.eval_sample_packing",
    "shuffle_merged_datasets": "data.shuffle_merged_datasets",
    "micro_batch_size": "train.micro_batch_size",
    "eval_batch_size": "train.eval_micro_batch_size",
    "num_epochs": "train.num_train_epochs",
    "wandb_name": "train.wandb_name",
    "wandb_run_id": "train.wandb_name",
    "mlflow_tracking_uri": "train.mlflow_tracking_uri",
    "tensor_parallel_size": "train.tensor_parallel_size",
    "context_parallel_size": "train.ringattn_parallel_size",
    "sequence_parallel_degree": "train.ringattn_parallel_size",
    "dp_shard_size": "train.data_parallel_shard_size",
    "dp_replicate_size": "train.data_parallel_replicate_size",
    "lora_model_dir": "lora.init_adapter_path",
    "hf_use_auth_token": "data.hf_use_auth_token",
    "push_dataset_to_hub": "data.push_dataset_to_hub",
    "activation_offloading": "train.enable_activation_offload",
    "expert_parallel_size": "train.expert_parallel_size",
}

COMPUTED: Mapping[str, Rule] = {
    **{
        name: rule
        for name, rule in training_arguments.COMPUTED.items()
        if name != "num_train_epochs"
    },
    "processor_type": _processor,
    "freeze_mm_modules": _frozen_images,
    "skip_prepare_dataset": no_effect("data is prepared once, before training"),
    "datasets": data.sources(SOURCES),
    "test_datasets": data.sources(TESTS),
    "pretraining_dataset": data.sources(SOURCES),
    "val_set_size": _held_out,
    "sequence_len": decides(shared.ROW, f"{SOURCES}.0.max_seq_len"),
    "excess_length_strategy": data.too_long,
    "sample_packing": decides(shared.METHOD, shared.GROUP),
    "train_on_inputs": truth("data.train_on_prompt"),
    "chat_template": _special,
    "special_tokens": _special,
    ON: _adapter,
    "load_in_4bit": _few_bits,
    "load_in_8bit": _few_bits,
    "lora_r": where(ON, *WITH_LORA, name="lora.lora_rank"),
    "lora_alpha": where(ON, *WITH_LORA, name="lora.lora_alpha"),
    "lora_dropout": where(ON, *WITH_LORA, name="lora.lora_dropout"),
    "peft_use_dora": where(ON, *WITH_LORA, name="lora.use_dora"),
    "peft_use_rslora": where(ON, *WITH_LORA, name="lora.use_rslora"),
    "loraplus_lr_ratio": where(ON, *WITH_LORA, name="lora.lora_plus_ratio"),
    "lora_target_modules": _targets,
    "lora_target_linear": _targets,
    "optimizer": schedule.optimizer,
    **{name: schedule.of_adam("optimizer") for name in (*schedule.BETAS, "adam_epsilon")},
    "lr_scheduler": schedule.schedule,
    "lr_scheduler_kwargs": schedule.schedule_arguments("lr_scheduler", "learning_rate"),
    "cosine_min_lr_ratio": _least_rate,
    "cosine_constant_lr_ratio": _constant_ratio,
    **dict.fromkeys(("bf16", "fp16", "bfloat16", "float16"), _precision),
    "gradient_checkpointing": _checkpointing,
    "evals_per_epoch": _a_share_of_epochs("eval"),
    "saves_per_epoch": _a_share_of_epochs("save"),
    "eval_steps": _eval_steps,
    "save_steps": _save_steps,
    "save_strategy": _saves,
    "early_stopping_patience": lambda entry: entry.put(
        "train.early_stopping.patience", entry.value
    ),
    "batch_size": _in_steps,
    "eot_tokens": _special,
    "adam_eps": schedule.of_adam("optimizer"),
    "auto_resume_from_checkpoints": shared.RESUMES,
    "attn_implementation": shared.attention,
    "sdp_attention": _attends("sdpa"),
    "eager_attention": _attends("eager"),
    "rl": _rl,
    "rl_beta": _beta,
    "dpo_beta": _beta,
    "orpo_alpha": where("rl", "orpo", name="preference.pref_loss_ratio"),
    "rpo_alpha": where("rl", "dpo", name="preference.sft_loss_ratio"),
    "simpo_gamma": where("rl", "simpo", name="preference.simpo_gamma"),
    "kto_desirable_weight": where("rl", "kto", name="preference.desirable_weight"),
    "kto_undesirable_weight": where("rl", "kto", name="preference.undesirable_weight"),
    "wandb_project": _project,
    "use_mlflow": tracks("mlflow"),
    "use_wandb": tracks("wandb"),
    **{name: no_effect(why) for name, why in IDLE.items()},
}

AXOLOTL = Dialect(
    name="axolotl",
    title="Axolotl",
    recognizes=_recognizes,
    same=SAME,
    computed=COMPUTED,
    refused=REFUSED,
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
    overridden_by={"rl_beta": ("dpo_beta", "orpo_alpha"), "bf16": ("bfloat16", "float16")},
    finalize=_finalize,
)
"""Files with `base_model`."""
