"""Models, training and adapters."""

from tests.register.places import (
    ADAPTERS,
    ALONE,
    ARRIVES,
    DATA,
    DECAY,
    EXPORT,
    FOLDERS,
    KEYS,
    MEMORY,
    MODEL,
    ONE_VALUE,
    PACK,
    PASSES,
    PLACES,
    PREPARE,
    RATES,
    RECOMPUTED,
    REFUSED,
    REMOTE,
    RUN,
    SAVED,
    STEP,
)

OF_TRAINING: dict[str, dict[str, tuple[str, ...]]] = {
    "model": {
        "model_path": (
            f"{MEMORY}test_weights_are_those_of_model_path_read_by_one_rank_or_by_all",
            "core/test_source.py::test_a_tokenizer_is_pinned_by_what_it_does_and_a_model_by_its_weights",
        ),
        "config_path": (MODEL, f"{KEYS}[model]"),
        "tokenizer_path": (
            f"{DATA}test_samples_are_made_with_the_tokenizer_that_is_named",
            "pipeline/test_keys.py::test_a_tokenizer_file_or_chat_template_changes_everything",
            f"{EXPORT}test_the_tokenizer_files_and_generation_config_of_a_base_model_are_kept_byte_for_byte",
        ),
        "attn_implementation": (
            f"{RUN}test_attention_runs_on_the_backend_that_is_named",
            f"{RUN}test_a_backend_that_cannot_run_here_is_refused",
        ),
        "merge_qkv": (MODEL, f"{ARRIVES}[model.merge_qkv]"),
        "basic_modules": (
            f"{MEMORY}test_named_modules_are_units_of_their_own_and_gathered_once_each",
        ),
        "foundation": (MODEL, f"{ARRIVES}[model.foundation]"),
    },
    "train": {
        "data_parallel_mode": (f"{MEMORY}test_the_mode_decides_what_a_rank_holds",),
        "data_parallel_shard_size": (
            f"{MEMORY}test_a_number_of_shards_that_does_not_fit_the_ranks_is_refused",
        ),
        "data_parallel_replicate_size": ONE_VALUE,
        "reshard_after_forward": (
            f"{MEMORY}test_weights_kept_after_the_forward_pass_are_not_gathered_again",
        ),
        "optimizer": (
            *DECAY,
            f"{STEP}test_without_another_word_the_optimizer_is_adamw",
            "optim/test_build.py::test_training_is_torchs_with_groups_made_by_hand",
        ),
        "lr": (*RATES, *DECAY),
        "lr_min": RATES,
        "lr_start": RATES,
        "lr_warmup_ratio": RATES,
        "lr_decay_style": RATES,
        "lr_decay_ratio": RATES,
        "weight_decay": DECAY,
        "no_decay_modules": DECAY,
        "no_decay_params": DECAY,
        "max_grad_norm": (
            f"{STEP}test_gradients_longer_than_the_limit_are_cut_to_it_and_0_is_no_limit",
        ),
        "micro_batch_size": PASSES,
        "gradient_accumulation_steps": PASSES,
        "global_batch_size": PASSES,
        "num_train_epochs": (f"{STEP}test_rows_that_do_not_fill_a_step_are_left_out_or_not",),
        "max_steps": (f"{STEP}test_max_steps_ends_a_run_before_and_after_its_epochs",),
        "seed": (
            f"{STEP}test_the_seed_decides_the_start_and_the_order",
            f"{PREPARE}test_validation_and_training_are_all_samples_and_share_none",
            f"{PACK}test_the_seed_decides_which_samples_share_a_row",
            f"{KEYS}[seed]",
        ),
        "enable_mixed_precision": (
            f"{MEMORY}test_mixed_precision_computes_in_bf16_and_keeps_fp32",
        ),
        "enable_gradient_checkpointing": RECOMPUTED,
        "enable_reentrant": RECOMPUTED,
        "recompute_modules": RECOMPUTED,
        "enable_forward_prefetch": (
            f"{MEMORY}test_prefetching_gathers_the_next_unit_before_this_one_runs",
        ),
        "init_device": (
            f"{MEMORY}test_weights_begin_where_init_device_says_and_end_on_the_training_device",
            f"{MEMORY}test_a_device_that_is_not_there_is_refused",
        ),
        "load_weights_mode": (
            f"{MEMORY}test_weights_are_those_of_model_path_read_by_one_rank_or_by_all",
        ),
        "empty_cache_steps": (f"{MEMORY}test_cached_memory_is_returned_at_the_steps_asked_for",),
        "gc_steps": (
            f"{MEMORY}test_garbage_is_collected_at_the_steps_asked_for_or_left_to_python",
        ),
        "output_dir": (
            *PLACES,
            f"{REMOTE}test_training_that_was_stopped_goes_on_on_another_machine",
        ),
        "ckpt_manager": (ALONE,),
        "save_steps": SAVED,
        "save_epochs": SAVED,
        "save_hf_weights": (FOLDERS,),
        "load_checkpoint_path": (
            "engine/test_resume.py::test_a_run_starts_from_a_checkpoint_that_is_named",
            f"{RUN}test_auto_goes_on_from_the_newest_checkpoint",
        ),
        "log_format": (f"{RUN}test_the_log_format_is_a_bar_or_lines",),
        "use_wandb": (REFUSED, f"{RUN}test_a_wish_that_comes_to_nothing_is_told"),
    },
    "lora": {
        "enable_lora": (ADAPTERS, f"{RUN}test_a_run_with_adapters_saves_them_alone"),
        "lora_rank": (ADAPTERS,),
        "lora_alpha": (ADAPTERS, f"{ARRIVES}[lora.lora_alpha]"),
        "lora_target_modules": (ADAPTERS,),
        "save_lora_only": (FOLDERS, f"{ARRIVES}[lora.save_lora_only]"),
    },
}
