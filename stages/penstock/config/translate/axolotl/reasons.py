"""Axolotl: keys without a setting of ours, by the reason."""

from collections.abc import Mapping

from penstock.config.translate import rule, shared
from penstock.config.translate.dialect import by_reason
from penstock.config.translate.translation import Rule

OF_REWARDS = "read by training with rewards alone"
OF_GROUPS = "one rate for all weights; train.vision_lr and train.projector_lr set two others"
DEQUANTIZED = "weights that are stored quantized are dequantized as they are read"
OF_SAMPLES = "write train.sample_prompts and train.sample_steps in a native file"

IDLE = by_reason(
    f"""
    group_by_length: rows have no padding to save
    liger_rope liger_rms_norm liger_glu_activation liger_layer_norm liger_fused_linear_cross_entropy
    liger_cross_entropy cut_cross_entropy lora_mlp_kernel lora_qkv_kernel lora_o_kernel plugins
    liger_rms_norm_gated use_kernels use_scattermoe use_sonicmoe experts_implementation
    fused_attn_kernel liger_swiglu expert_backend flash_attn_cross_entropy flash_attn_rms_norm
    flash_attn_fuse_mlp lora_embedding_kernel chunked_cross_entropy moe_grouped_backend
    chunked_cross_entropy_num_chunks llama4_linearized_experts moe_bnb_fast use_dsv4_kernels
    use_glm_dsa_kernels dpo_use_liger_kernel unsloth_cross_entropy_loss unsloth_lora_mlp
    unsloth_lora_qkv unsloth_lora_o unsloth_rms_norm unsloth_rope moe_dequant_chunk_size
    gptq_disable_exllama flash_optimum deepcompile
    dpo_padding_free: fused kernels are taken wherever they serve
    strict is_llama_derived_model is_mistral_derived_model model_type tokenizer_type
    tokenizer_use_fast wandb_log_model gc_steps max_packed_sequence_len gptq_groupsize gptq_model_v1
    fsdp_version torchdistx_path experimental_skip_move_to_device lora_model_dir_is_local
    sample_packing_bin_size save_first_step is_falcon_derived_model is_qwen_derived_model
    cls_model_config device tokenizer_legacy tokenizer_save_jinja_files gc_collect_steps ddp
    sample_packing_eff_est sample_packing_seq_len_multiplier world_size total_num_tokens
    total_supervised_tokens is_preprocess device_map axolotl_config_path preprocess_iterable
    dataset_keep_in_memory multipack_real_batches low_cpu_mem_usage max_memory gpu_memory_limit
    wandb_mode include_tkps merge_method heads_k_stride ring_attn_func torch_compile_options
    fsdp_final_state_dict_type torch_dtype adapter_dtype lora_on_cpu base_model_ignore_patterns
    full_finetune test_value qlora_sharded_model_loading overrides_of_model_kwargs
    dpo_use_logits_to_keep eval_table_size eval_max_new_tokens dynamic_checkpoint
    type_of_model: {shared.OF_PYTHON}
    loss_watchdog_threshold loss_watchdog_patience: a high loss does not end a run
    tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp selective_checkpointing
    layer_offloading relora_cpu_offload embeddings_skip_upcast
    peft_autocast_adapter_dtype: what is kept in memory, which changes no result
    num_labels center_rewards_coefficient dpo_generate_during_eval: {OF_REWARDS}
    adam_beta3 adam_epsilon2: read by the optimizer CAME alone
    flash_attention flex_attention xformers_attention sage_attention flex_attn_compile_kwargs
    gemma4_hybrid_attn_impl large_head_attention flash_attn_d512 sdpa_varlen: {shared.BEST_HERE}
    pretrain_multipack_buffer_size streaming_multipack_buffer_size
    sample_packing_group_size: all samples are packed together
    do_causal_lm_eval eval_causal_lm_metrics
    do_bench_eval: evaluations log loss and perplexity; penstock eval measures answers
    bench_dataset bench_split: penstock eval measures answers
    model_quantization_config model_quantization_config_kwargs: {DEQUANTIZED}
    mlflow_experiment_name mlflow_run_name hf_mlflow_log_artifacts trackio_project_name
    trackio_run_name: runs have the name train.wandb_name, or that of their output_dir
    pad_to_sequence_len: rows are padded to whole 128 tokens, which changes no result
    batch_flattening: rows have no padding between samples
    pretraining_sample_concatenation: samples are packed
    fp32_norms fp32_norm_classes: norms compute in float32
    quantize_moe_experts: adapter: qlora quantizes experts too
    lora_fan_in_fan_out: a form of layers that no family here has
    dataset_processes: how samples are prepared, which changes none
    bnb_config_kwargs: scales are kept as they are, a little larger
    skip_prepare_dataset: data is prepared once, before training
    wandb_watch: gradients are logged by train.log_grad_norm
    wandb_entity: a login says it: set WANDB_ENTITY in the environment
    load_best_model_at_end: write train.save_best in a native file
    """
)


UNSUPPORTED = by_reason(
    f"""
    tokens added_tokens_overrides resize_token_embeddings_to_32x shrink_embeddings
    mean_resizing_embeddings fix_untrained_tokens: the vocabulary is that of the checkpoint
    noisy_embedding_alpha: no noise is added to embeddings
    embedding_lr embedding_lr_scale lr_groups loraplus_lr_embedding: {OF_GROUPS}
    lisa_n_layers lisa_step_interval lisa_layers_attribute spectrum_top_fraction
    spectrum_model_name: all layers are trained in every step; adapters take less memory too
    use_eaft eaft_alpha eaft_k dpo_use_weighting: all tokens count the same
    qat quantization llmcompressor
    use_onebitllms: weights are trained as they are; export.quantise quantizes the result
    nonexpert_quantization gemma4_nf4_nonexpert gemma4_fp8_nonexpert dsv4_fp8_nonexpert_mode
    dsv4_fp4_grouped_mode nvfp4_merge_aware
    nvfp4_merge_aware_start_step: base weights are quantized by adapter: qlora alone, to nf4
    peft_layers_to_transform peft_layers_pattern lora_target_parameters lora_rank_pattern
    lora_alpha_pattern: name layers by patterns in lora_target_modules
    image_size image_resize_algorithm processor_kwargs: {shared.SIZED}
    lora_modules_to_save: {shared.BESIDE_ADAPTERS}
    peft_trainable_token_indices
    peft_ensure_weight_tying: whole layers beside adapters are not trained
    peft_layer_replication: layers are not added
    peft peft_init_lora_weights: adapters start at zero; lora_model_dir names another to start from
    lr_quadratic_warmup: warmup is linear
    lr_div_factor: write train.lr_start in a native file
    jagged_restart_warmup_steps jagged_restart_anneal_steps: the learning rate does not restart
    s2_attention: documents are attended to whole
    scaling_softmax scaling_softmax_factor
    scaling_softmax_bias: attention is that of the model's family
    use_pose: positions are those of the tokens; rope_scaling lengthens the context
    dense_mixer: routers get the gradients of the experts that were chosen
    gptq: base weights are quantized as they are read: write adapter: qlora
    min_sample_len: short samples are trained as others are
    eval_sequence_len: write max_seq_len in data.test_datasets of a native file
    default_system_message: write it into the chat template or the data
    revision_of_model: the newest commit is read; download another to a folder
    cpo_alpha: write preference.sft_loss_ratio in a native file
    dpo_norm_loss: write preference.length_normalize in a native file
    role_boundaries: the chat template says where turns begin
    """
)

# Prefixes of keys that concern one thing.
FAMILIES: Mapping[str, Rule | str] = {
    **by_reason(
        f"""
        use_swanlab use_comet swanlab_ comet_ use_otel_metrics otel_metrics_: {shared.NO_TRACKER}
        trl. vllm. ebft. nemo_gym_: {OF_REWARDS}
        kd_ pose_: read with what is refused alone
        dion_ qgalore_: read by that optimizer alone
        generation_ generate_samples num_generation_: {OF_SAMPLES}
        use_ray ray_ resources_per_worker: torchrun starts it
        gradio_: penstock chat answers prompts
        lm_eval_: penstock eval RUN --harness TASKS evaluates
        expert_parallel_: {shared.OF_PYTHON}
        """
    ),
    "hatchery": rule.unsupported("training runs here; penstock serve takes such clients"),
    **dict.fromkeys(
        ("mora.", "grokfast_"), rule.unsupported("adapters and gradients are as they are")
    ),
}
