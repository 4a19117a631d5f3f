"""The long sections of the config, parted into what decides the result and what does not.

Every field of `model`, `train` and `lora` stands in exactly one of three tables (a test counts).
Two runs that agree in IDENTITY and in what PINNED names share one result; HOW never builds anything
again. A field that alters the mathematics belongs above; where and how fast it runs, below.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.config.schema.run import RunConfig
from penstock.config.schema.train import TrainConfig


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


IDENTITY: Mapping[str, frozenset[str]] = {
    "model": _names(
        """
        foundation encoders merge_qkv router_fp32 freeze_router lm_head_fp32 attention_cast_bf16
        """
    ),
    "train": _names(
        """
        optimizer optimizer_dtype optimizer_kwargs lr lr_min lr_start lr_warmup_ratio
        lr_warmup_steps lr_decay_style lr_decay_ratio lr_schedule_kwargs layerwise_lr_decay_bound
        weight_decay no_decay_modules no_decay_params max_grad_norm muon_lr muon_momentum
        muon_nesterov muon_ns_steps muon_adjust_lr_fn num_train_epochs max_steps
        max_tokens max_hours eval_only
        moe_aux_loss_coef moe_global_load_balancing moe_z_loss_coef moe_bias_update_rate
        label_smoothing z_loss_coef save_optimizer load_optimizer ckpt_weights ckpt_quant
        precision master_weights stochastic_rounding grad_accum_dtype loss_scale_init
        enable_mixed_precision enable_fp8_training fp8 fsdp_reduce_dtype dropout seed
        """
    ),
    "lora": _names(
        """
        enable_lora lora_rank lora_alpha use_rslora use_dora lora_plus_ratio lora_bias lora_dropout
        lora_target_modules moe_shared_lora moe_hybrid_shared_lora enable_qlora quant_format
        quant_group_size exclude_modules merge_lora_interval reset_optimizer_on_merge enable_aqn
        aqn_alpha
        """
    ),
}
"""What enters the train stage's key as it is written."""

JUDGING = _names(
    """
    early_stopping save_best eval_steps eval_epochs eval_at_end eval_max_batches
    eval_rows_per_batch
    """
)
"""What enters the train stage's key together, where a run is judged by evaluations."""

PINNED: Mapping[str, frozenset[str]] = {
    "model": _names("model_path config_path tokenizer_path"),
    # The batch sizes make, together with the layout, the rows of one step.
    "train": _names(
        "objective load_checkpoint_path init_checkpoint_path micro_batch_size "
        "gradient_accumulation_steps global_batch_size"
    )
    | JUDGING,
    "lora": _names("init_adapter_path"),
}
"""What enters a key through what it stands for: a source's content, the rows of a step."""

HOW: Mapping[str, frozenset[str]] = {
    "model": _names(
        """
        attn_implementation moe_implementation rmsnorm_native activation_native rope_native
        ep_dispatch deepep_buffer_size_gb deepep_num_sms
        deepep_async_combine basic_modules
        """
    ),
    "train": _names(
        """
        data_parallel_mode data_parallel_shard_size data_parallel_replicate_size zero_stage
        comm_bucket_mb tp_reduce_dtype
        tensor_parallel_size sequence_parallel tp_vocab_parallel_loss pipeline_parallel_size
        pipeline_parallel_schedule pipeline_parallel_virtual_stages pipeline_parallel_split
        pipeline_parallel_input_weight pipeline_parallel_output_weight
        pp_variable_seq_lengths expert_parallel_size ulysses_parallel_size ringattn_parallel_size
        cp_fsdp_mode reshard_after_forward ep_outside ce_mode enable_gradient_checkpointing
        enable_reentrant recompute_modules moe_checkpoint_method enable_full_shard
        fuse_optimizer_step optimizer_offload enable_fsdp_offload enable_forward_prefetch
        enable_activation_offload activation_gpu_limit
        enable_fp8_all_gather enable_compile init_device load_weights_mode enable_full_determinism
        allow_cuda_launch_blocking empty_cache_steps gc_steps output_dir ckpt_manager ckpt_name
        save_steps save_epochs save_async save_total_limit save_hf_weights require_checkpoint
        eval_at_start eval_micro_batch_size eval_sanity_batches
        sample_prompts sample_steps sample_max_new_tokens log_format log_interval
        log_ranks log_grad_norm log_param_norm log_router_stats log_loss_spikes log_recovery_timing
        report_interval report_samples use_wandb use_tensorboard log_dir use_mlflow use_trackio
        wandb_project wandb_name wandb_tags
        wandb_log_interval mlflow_tracking_uri enable_profiling
        profile_start_step profile_end_step profile_trace_dir profile_record_shapes
        profile_profile_memory profile_with_stack profile_rank0_only
        """
    ),
    "lora": _names("save_lora_only"),
}
"""How the work is done."""


UNSET: Mapping[str, Any] = {"lora.quant_group_size": 16}
"""What keys hold where these are null: the default that they had when results were first made."""


def identity_fields(run: RunConfig, section: str, names: Iterable[str]) -> dict[str, Any]:
    """The fields of a section as keys hold them, by name in alphabetical order."""
    values = getattr(run, section).model_dump(mode="json", include=set(names))
    return {
        name: UNSET.get(f"{section}.{name}") if values[name] is None else values[name]
        for name in sorted(values)
    }


def eval_identity_fields(train: TrainConfig) -> dict[str, Any] | None:
    """What decides when a run ends, or which checkpoint is its result, by evaluations; None where
    these change nothing."""
    if not train.early_stopping.patience and not train.save_best.metric:
        return None
    found = train.model_dump(mode="json", include=set(JUDGING))
    # Unset it has the same effect as before it existed, and leaves keys as they were.
    if found["eval_rows_per_batch"] is None:
        del found["eval_rows_per_batch"]
    return found


def preference_identity(run: RunConfig) -> dict[str, Any] | None:
    """How preferences are learnt; None where tokens are."""
    if run.train.objective != "preference":
        return None
    # How answers are paired decides the packed rows, and their key is an input.
    found = run.preference.model_dump(
        mode="json", exclude={"precompute_ref_logps", "kl_pairing", "kl_rotation_size"}
    )
    if found["sft_loss_scope"] == "answer":
        del found["sft_loss_scope"]
    return found
