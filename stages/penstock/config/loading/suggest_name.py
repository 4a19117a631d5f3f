"""The nearest valid name of an unknown config key ("did you mean")."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from penstock.config.loading.fault import Steps
from penstock.config.loading.schema_tree import annotation_at, is_section, sections
from penstock.config.schema.base import ConfigSection
from penstock.config.schema.run import RunConfig

# Settings, and what other tools call them.
NAMES_ELSEWHERE: Mapping[str, str] = {
    # models
    "model.model_path": "base_model model_name model_name_or_path pretrained_model_name_or_path",
    "model.config_path": "base_model_config",
    "model.tokenizer_path": "tokenizer_name tokenizer_config",
    "model.attn_implementation": "attn flash_attn flash_attention use_flash_attention_2"
    " use_flash_attn",
    # data
    "data.datasets": "dataset dataset_name dataset_path train_files",
    "data.test_datasets": "eval_dataset",
    "data.sample_packing_sequence_len": "sequence_len seq_len cutoff_len max_length max_seq_length"
    " model_max_length",
    "data.sample_packing_method": "packing sample_packing",
    "data.dataset_num_proc": "preprocessing_num_workers dataset_processes",
    "data.val_set_size": "test_size val_size",
    "data.dataset_prepared_path": "cache_dir tokenized_path",
    "data.datasets[].field_messages": "chat_template_field",
    # training
    "train.lr": "learning_rate",
    "train.lr_min": "min_lr",
    "train.vision_lr": "vit_lr vision_tower_lr mm_vision_tower_lr",
    "train.projector_lr": "aligner_lr mm_projector_lr",
    "train.lr_decay_style": "lr_scheduler lr_scheduler_type",
    "train.lr_warmup_ratio": "warmup_ratio",
    "train.lr_warmup_steps": "warmup_steps",
    "train.num_train_epochs": "num_epochs epochs",
    "train.max_hours": "max_time",
    "train.max_tokens": "max_train_tokens",
    "train.eval_steps": "evaluation_strategy eval_strategy eval_interval",
    "train.eval_epochs": "evals_per_epoch",
    "train.eval_at_start": "eval_on_start",
    "train.eval_sanity_batches": "num_sanity_val_steps",
    "train.eval_micro_batch_size": "eval_batch_size per_device_eval_batch_size",
    "train.eval_max_batches": "max_evaluate_steps",
    "train.early_stopping.patience": "early_stopping_patience",
    "train.early_stopping.min_delta": "early_stopping_threshold",
    "train.save_best.metric": "load_best_model_at_end metric_for_best_model",
    "train.save_best.mode": "greater_is_better",
    "train.max_steps": "max_steps_per_epoch",
    "train.micro_batch_size": "batch_size per_device_train_batch_size",
    "train.global_batch_size": "train_batch_size",
    "train.lr_schedule_kwargs": "lr_scheduler_kwargs",
    "train.optimizer": "optim",
    "train.optimizer_kwargs": "optim_args adam_beta1 adam_beta2 adam_epsilon",
    "train.max_grad_norm": "gradient_clipping clip_grad_norm",
    "train.dropout.hidden": "hidden_dropout hidden_dropout_prob",
    "train.dropout.ffn": "ffn_dropout",
    "train.dropout.warmup_steps": "dropout_warmup_steps",
    "train.precision": "bf16 fp16 mixed_precision",
    "train.enable_gradient_checkpointing": "gradient_checkpointing enable_activation_checkpointing",
    "train.moe_aux_loss_coef": "router_aux_loss_coef aux_loss_coef moe_aux_loss_lambda",
    "train.moe_z_loss_coef": "router_z_loss_coef moe_z_loss_coeff",
    "train.label_smoothing": "label_smoothing_factor",
    "train.z_loss_coef": "auxiliary_loss_multiplier softmax_auxiliary_loss",
    "train.ce_mode": "use_fused_head_and_loss_fn",
    "train.moe_bias_update_rate": "moe_router_bias_update_rate",
    "train.enable_compile": "torch_compile compile",
    "train.load_checkpoint_path": "resume_from_checkpoint auto_resume_from_checkpoints",
    "train.save_epochs": "saves_per_epoch",
    "train.use_wandb": "report_to",
    "train.log_interval": "logging_steps",
    "train.use_tensorboard": "tensorboard",
    "train.wandb_name": "wandb_run_name",
    "pipeline.name": "run_name",
    "launch.nnodes": "num_nodes",
    "launch.rdzv_endpoint": "master_addr master_port",
    "train.data_parallel_mode": "deepspeed fsdp",
    "launch.nproc_per_node": "num_processes",
    # adapters
    "lora.enable_lora": "adapter use_peft finetuning_type",
    "lora.lora_rank": "lora_r r rank",
    "lora.lora_alpha": "alpha",
    "lora.lora_dropout": "dropout",
    "lora.lora_target_modules": "lora_target target_modules lora_attn_modules",
    "lora.init_adapter_path": "adapter_name_or_path lora_model_dir lora_path",
    "lora.lora_plus_ratio": "loraplus_lr_ratio lora_plus_scale",
    "lora.use_dora": "peft_use_dora",
    "lora.use_rslora": "peft_use_rslora rslora",
    "lora.enable_qlora": "load_in_4bit",
    # results
    "push.repo_id": "hub_model_id push_to_hub",
    "push.private": "hub_private_repo",
    "pipeline.artifacts_path": "export_dir",
    "export.quantise": "quantize",
}

SYNONYMS = {name: setting for setting, names in NAMES_ELSEWHERE.items() for name in names.split()}

# Ratios of difflib, whose own cutoff is 0.6.
NEAR_ENOUGH = 0.72
VERY_NEAR = 0.85


def suggest(path: Steps, root: type[ConfigSection] = RunConfig) -> str | None:
    """The most similar setting to the unknown `path`: the bare name of one in the same section or,
    in a run, the full name of one elsewhere."""
    name = str(path[-1])
    if name.lower() != name and (meant := suggest((*path[:-1], name.lower()), root)):
        return meant
    section = annotation_at(path[:-1], root)
    siblings = list(section.model_fields) if is_section(section) else []
    if name in siblings:
        return name
    if near := get_close_matches(name, siblings, 1, VERY_NEAR):
        return near[0]
    if root is not RunConfig:
        bare = SYNONYMS.get(name.lower(), "").rpartition(".")[2]
        near = [bare] if bare in siblings else get_close_matches(name, siblings, 1, NEAR_ENOUGH)
        return near[0] if near else None
    if meant := SYNONYMS.get(name.lower()):
        return _from(section, meant)
    elsewhere: dict[str, str] = {}
    for section_name, kind in sections().items():
        if name in kind.model_fields:
            return f"{section_name}.{name}"
        elsewhere |= dict.fromkeys(kind.model_fields, section_name)
    if near := get_close_matches(name, siblings, 1, NEAR_ENOUGH):
        return near[0]
    begun = [sibling for sibling in siblings if sibling.startswith(name)]
    if len(begun) == 1:
        return begun[0]
    if near := get_close_matches(name, elsewhere, 1, VERY_NEAR):
        return f"{elsewhere[near[0]]}.{near[0]}"
    if near := get_close_matches(name.lower(), SYNONYMS, 1, VERY_NEAR):
        return _from(section, SYNONYMS[near[0]])
    return None


def _from(section: Any, setting: str) -> str:
    # The name of a setting as seen from `section`: bare if it is in that section.
    section_name, _, bare = setting.rpartition(".")
    return bare if sections().get(section_name) is section else setting
