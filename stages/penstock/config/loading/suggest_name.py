"""The nearest valid name of an unknown config key ("did you mean")."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from penstock.config.loading.fault import Steps
from penstock.config.loading.schema_tree import annotation_at, is_section, sections
from penstock.config.schema.base import ConfigSection
from penstock.config.schema.run import RunConfig

SYNONYMS: Mapping[str, str] = {
    # models
    "base_model": "model.model_path",
    "model_name": "model.model_path",
    "model_name_or_path": "model.model_path",
    "pretrained_model_name_or_path": "model.model_path",
    "base_model_config": "model.config_path",
    "tokenizer_name": "model.tokenizer_path",
    "tokenizer_config": "model.tokenizer_path",
    "attn": "model.attn_implementation",
    "flash_attn": "model.attn_implementation",
    "flash_attention": "model.attn_implementation",
    "use_flash_attention_2": "model.attn_implementation",
    "use_flash_attn": "model.attn_implementation",
    # data
    "dataset": "data.datasets",
    "dataset_name": "data.datasets",
    "dataset_path": "data.datasets",
    "train_files": "data.datasets",
    "eval_dataset": "data.test_datasets",
    "sequence_len": "data.sample_packing_sequence_len",
    "seq_len": "data.sample_packing_sequence_len",
    "cutoff_len": "data.sample_packing_sequence_len",
    "max_length": "data.sample_packing_sequence_len",
    "max_seq_length": "data.sample_packing_sequence_len",
    "model_max_length": "data.sample_packing_sequence_len",
    "packing": "data.sample_packing_method",
    "sample_packing": "data.sample_packing_method",
    "preprocessing_num_workers": "data.dataset_num_proc",
    "dataset_processes": "data.dataset_num_proc",
    "test_size": "data.val_set_size",
    "val_size": "data.val_set_size",
    "cache_dir": "data.dataset_prepared_path",
    "tokenized_path": "data.dataset_prepared_path",
    "chat_template_field": "data.datasets[].field_messages",
    # training
    "learning_rate": "train.lr",
    "min_lr": "train.lr_min",
    "vit_lr": "train.vision_lr",
    "vision_tower_lr": "train.vision_lr",
    "mm_vision_tower_lr": "train.vision_lr",
    "aligner_lr": "train.projector_lr",
    "mm_projector_lr": "train.projector_lr",
    "lr_scheduler": "train.lr_decay_style",
    "lr_scheduler_type": "train.lr_decay_style",
    "warmup_ratio": "train.lr_warmup_ratio",
    "warmup_steps": "train.lr_warmup_steps",
    "num_epochs": "train.num_train_epochs",
    "max_time": "train.max_hours",
    "max_train_tokens": "train.max_tokens",
    "evaluation_strategy": "train.eval_steps",
    "eval_strategy": "train.eval_steps",
    "eval_interval": "train.eval_steps",
    "evals_per_epoch": "train.eval_epochs",
    "eval_on_start": "train.eval_at_start",
    "num_sanity_val_steps": "train.eval_sanity_batches",
    "eval_batch_size": "train.eval_micro_batch_size",
    "per_device_eval_batch_size": "train.eval_micro_batch_size",
    "max_evaluate_steps": "train.eval_max_batches",
    "early_stopping_patience": "train.early_stopping.patience",
    "early_stopping_threshold": "train.early_stopping.min_delta",
    "load_best_model_at_end": "train.save_best.metric",
    "metric_for_best_model": "train.save_best.metric",
    "greater_is_better": "train.save_best.mode",
    "epochs": "train.num_train_epochs",
    "max_steps_per_epoch": "train.max_steps",
    "batch_size": "train.micro_batch_size",
    "per_device_train_batch_size": "train.micro_batch_size",
    "train_batch_size": "train.global_batch_size",
    "lr_scheduler_kwargs": "train.lr_schedule_kwargs",
    "optim": "train.optimizer",
    "optim_args": "train.optimizer_kwargs",
    "adam_beta1": "train.optimizer_kwargs",
    "adam_beta2": "train.optimizer_kwargs",
    "adam_epsilon": "train.optimizer_kwargs",
    "gradient_clipping": "train.max_grad_norm",
    "clip_grad_norm": "train.max_grad_norm",
    "hidden_dropout": "train.dropout.hidden",
    "hidden_dropout_prob": "train.dropout.hidden",
    "ffn_dropout": "train.dropout.ffn",
    "dropout_warmup_steps": "train.dropout.warmup_steps",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "mixed_precision": "train.precision",
    "gradient_checkpointing": "train.enable_gradient_checkpointing",
    "enable_activation_checkpointing": "train.enable_gradient_checkpointing",
    "router_aux_loss_coef": "train.moe_aux_loss_coef",
    "aux_loss_coef": "train.moe_aux_loss_coef",
    "moe_aux_loss_lambda": "train.moe_aux_loss_coef",
    "router_z_loss_coef": "train.moe_z_loss_coef",
    "moe_z_loss_coeff": "train.moe_z_loss_coef",
    "label_smoothing_factor": "train.label_smoothing",
    "auxiliary_loss_multiplier": "train.z_loss_coef",
    "softmax_auxiliary_loss": "train.z_loss_coef",
    "use_fused_head_and_loss_fn": "train.ce_mode",
    "moe_router_bias_update_rate": "train.moe_bias_update_rate",
    "torch_compile": "train.enable_compile",
    "compile": "train.enable_compile",
    "resume_from_checkpoint": "train.load_checkpoint_path",
    "auto_resume_from_checkpoints": "train.load_checkpoint_path",
    "saves_per_epoch": "train.save_epochs",
    "report_to": "train.use_wandb",
    "logging_steps": "train.log_interval",
    "tensorboard": "train.use_tensorboard",
    "wandb_run_name": "train.wandb_name",
    "run_name": "pipeline.name",
    "num_nodes": "launch.nnodes",
    "master_addr": "launch.rdzv_endpoint",
    "master_port": "launch.rdzv_endpoint",
    "deepspeed": "train.data_parallel_mode",
    "fsdp": "train.data_parallel_mode",
    "num_processes": "launch.nproc_per_node",
    # adapters
    "adapter": "lora.enable_lora",
    "use_peft": "lora.enable_lora",
    "finetuning_type": "lora.enable_lora",
    "lora_r": "lora.lora_rank",
    "r": "lora.lora_rank",
    "rank": "lora.lora_rank",
    "alpha": "lora.lora_alpha",
    "dropout": "lora.lora_dropout",
    "lora_target": "lora.lora_target_modules",
    "target_modules": "lora.lora_target_modules",
    "lora_attn_modules": "lora.lora_target_modules",
    "adapter_name_or_path": "lora.init_adapter_path",
    "lora_model_dir": "lora.init_adapter_path",
    "lora_path": "lora.init_adapter_path",
    "loraplus_lr_ratio": "lora.lora_plus_ratio",
    "lora_plus_scale": "lora.lora_plus_ratio",
    "peft_use_dora": "lora.use_dora",
    "peft_use_rslora": "lora.use_rslora",
    "rslora": "lora.use_rslora",
    "load_in_4bit": "lora.enable_qlora",
    # results
    "hub_model_id": "push.repo_id",
    "push_to_hub": "push.repo_id",
    "hub_private_repo": "push.private",
    "export_dir": "pipeline.artifacts_path",
    "quantize": "export.quantise",
}


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
    homes = [
        f"{section_name}.{name}"
        for section_name, kind in sections().items()
        if name in kind.model_fields
    ]
    if homes:
        return homes[0]
    if near := get_close_matches(name, siblings, 1, NEAR_ENOUGH) or _completed(name, siblings):
        return near[0]
    elsewhere = {
        field: section_name
        for section_name, kind in sections().items()
        for field in kind.model_fields
    }
    if near := get_close_matches(name, elsewhere, 1, VERY_NEAR):
        return f"{elsewhere[near[0]]}.{near[0]}"
    if near := get_close_matches(name.lower(), SYNONYMS, 1, VERY_NEAR):
        return _from(section, SYNONYMS[near[0]])
    return None


def _from(section: Any, setting: str) -> str:
    """The name of a setting as seen from `section`: bare if it is in that section."""
    section_name, _, bare = setting.rpartition(".")
    return bare if sections().get(section_name) is section else setting


def _completed(name: str, names: list[str]) -> list[str]:
    """The only name that begins with this one."""
    matches = [candidate for candidate in names if candidate.startswith(name)]
    return matches if len(matches) == 1 else []
