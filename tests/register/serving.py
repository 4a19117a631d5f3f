"""Training servers: what fails when a setting of their flat file does nothing.

Tests are named by their file in `tests/server` and their name.
"""

ARRIVES = "settings/test_settings_arrive.py::"
LEARNING = "settings/test_settings_of_training.py::"
CONFIG = "settings/test_config.py::"
LAUNCHER = "processes/test_launcher.py::"
WORKER = "workers/test_worker.py::"
FILES = "scheduler/test_resident_files.py::"
RECOVERY = "processes/test_recovery.py::"
SESSIONS = "scheduler/test_sessions.py::"
STORAGE = "scheduler/test_storage.py::"
PACKING = "scheduler/test_packing.py::"
API = "api/test_api.py::"

ENGINE = f"{ARRIVES}test_the_engine_is_told_what_is_written"
OF_API = f"{ARRIVES}test_the_api_is_told_what_is_written"
MODEL = f"{ARRIVES}test_a_model_is_taken_from_where_each_part_of_it_is_said_to_be"
ASSEMBLING = f"{ARRIVES}test_workers_assemble_what_is_written"
SERVED = f"{LEARNING}test_clients_are_told_of_the_model_as_it_is_written"
OPTIMIZER = f"{LEARNING}test_a_setting_of_the_optimizer_changes_what_is_learnt"
UNASKED = f"{LEARNING}test_an_adapter_is_as_the_file_says_where_its_client_does_not"
ROWS = f"{LEARNING}test_rows_are_filled_up_as_is_written"
PRECISION = f"{WORKER}test_a_precision_that_is_written_changes_what_clients_are_told"
PLAIN = f"{WORKER}test_operations_are_plain_where_that_is_written"
LAYOUTS = "workers/test_losses_of_clients.py::test_every_layout_finds_the_same"
MERGED = f"{FILES}test_adapters_that_are_merged_make_the_base_the_models_own"
RANKS = f"{ARRIVES}test_torchrun_is_told_of_workers_and_machines_as_is_written"
BOUND = f"{ARRIVES}test_rank_0_listens_where_that_is_written"
LOGGED = f"{ARRIVES}test_processes_tell_of_themselves_as_much_as_is_written"
REFUSED = f"{ARRIVES}test_a_value_that_is_not_served_is_refused"
LIMITS = f"{ARRIVES}test_workers_wait_as_long_as_is_written"
ENDING = f"{ARRIVES}test_workers_have_as_long_to_end_as_is_written"

MODELS = "api/test_limits.py::test_no_more_models_are_open_than_may_be"
OPEN_SESSIONS = "api/test_limits.py::test_no_more_sessions_are_open_than_may_be"

ASSEMBLED = (
    *("attn_implementation", "moe_implementation", "ep_dispatch", "deepep_buffer_size_gb"),
    *("deepep_num_sms", "deepep_async_combine", "merge_qkv", "basic_modules", "router_fp32"),
    *("lm_head_fp32", "rmsnorm_native", "activation_native", "rope_native"),
    *("attention_cast_bf16", "freeze_router", "data_parallel_mode", "data_parallel_shard_size"),
    *("data_parallel_replicate_size", "tensor_parallel_size", "pipeline_parallel_size"),
    *("pipeline_parallel_schedule", "expert_parallel_size", "ulysses_parallel_size"),
    *("ringattn_parallel_size", "cp_fsdp_mode", "reshard_after_forward"),
    *("enable_mixed_precision", "enable_gradient_checkpointing", "enable_full_shard"),
    *("enable_activation_offload", "enable_compile", "enable_reentrant"),
    *("enable_forward_prefetch", "init_device", "enable_lora", "lora_target_modules"),
    *("moe_shared_lora", "moe_hybrid_shared_lora", "enable_qlora", "quant_format"),
    *("quant_group_size", "qlora_exclude_modules"),
)
"""Settings that the workers' model is assembled by, as a run's is: tests of runs would miss them,
once they arrive."""

OF_SERVER: dict[str, tuple[str, ...]] = {
    "model_path": (MODEL, ASSEMBLING),
    "model_name": (SERVED, ENGINE, f"{LEARNING}test_a_model_is_asked_for_by_the_name_of_the_file"),
    "config_path": (MODEL,),
    "tokenizer_path": (MODEL, SERVED),
    "encoders": (REFUSED,),
    "foundation": (ASSEMBLING,),
    "router_fp32": (PRECISION,),
    "lm_head_fp32": (PRECISION,),
    "attention_cast_bf16": (PRECISION,),
    "rmsnorm_native": (PLAIN,),
    "activation_native": (PLAIN,),
    "rope_native": (PLAIN,),
    "data_parallel_replicate_size": (f"{LAYOUTS}[replicate 2]",),
    "tensor_parallel_size": (f"{LAYOUTS}[tp 2, sequence parallel]",),
    "pipeline_parallel_size": (f"{LAYOUTS}[pp 2]",),
    "ulysses_parallel_size": (f"{LAYOUTS}[ulysses 2]",),
    "ringattn_parallel_size": (f"{LAYOUTS}[ring 2 sharded]",),
    "pp_variable_seq_lengths": (ROWS,),
    "seed": (UNASKED,),
    "load_weights_mode": (REFUSED,),
    "ce_mode": (f"{LEARNING}test_the_head_is_computed_as_is_written",),
    "optimizer": (OPTIMIZER,),
    "optimizer_dtype": (OPTIMIZER,),
    "muon_lr": (OPTIMIZER, f"{LEARNING}test_matrices_learn_at_the_rate_of_the_file_under_muon"),
    "muon_momentum": (OPTIMIZER,),
    "muon_nesterov": (OPTIMIZER,),
    "muon_ns_steps": (OPTIMIZER,),
    "muon_adjust_lr_fn": (OPTIMIZER,),
    "enable_lora": (SERVED, UNASKED),
    "lora_rank": (SERVED, UNASKED, f"{FILES}test_what_cannot_be_is_refused_with_what_to_do"),
    "lora_alpha": (UNASKED,),
    "merge_lora_interval": (MERGED,),
    "reset_optimizer_on_merge": (MERGED,),
    "output_dir": (f"{ARRIVES}test_all_is_kept_in_the_folder_that_is_written",),
    "ckpt_manager": (REFUSED,),
    "load_checkpoint_path": (
        ASSEMBLING,
        f"{WORKER}test_new_models_start_from_the_checkpoint_that_the_file_names",
    ),
    "storage_limit": (
        ENGINE,
        f"{CONFIG}test_a_size_is_read_as_it_is_meant",
        f"{STORAGE}test_what_does_not_fit_is_refused_before_anything_is_written",
    ),
    "idle_session_timeout": (
        ENGINE,
        OF_API,
        f"{SESSIONS}test_an_idle_session_is_saved_before_it_is_freed_and_another_goes_on_from_there",
    ),
    "skip_initial_checkpoint": (
        ENGINE,
        f"{SESSIONS}test_nothing_is_saved_of_a_new_model_where_settings_say_so",
    ),
    "sample_packing_sequence_len": (
        ENGINE,
        ROWS,
        f"{PACKING}test_every_sample_is_in_one_row_and_none_is_too_long",
        "scheduler/test_order.py::test_what_cannot_be_done_fails_at_once_and_its_number_is_used_up",
    ),
    "enable_packing": (ENGINE, f"{PACKING}test_without_packing_each_sample_has_a_row"),
    "sample_packing_strategy": (
        ENGINE,
        f"{PACKING}test_their_order_is_kept_where_that_is_wanted",
        f"{PACKING}test_few_rows_are_made_where_that_is_wanted",
        f"{PACKING}test_replicas_get_as_many_rows_and_about_as_many_tokens",
    ),
    "pad_to_multiple_of": (ROWS,),
    "log_level": (LOGGED,),
    "enable_self_test": (
        f"{ARRIVES}test_workers_try_themselves_only_where_that_is_written",
        f"{WORKER}test_the_self_test_passes_where_all_is_well_and_leaves_nothing",
    ),
    "log_gradient_norms": (
        f"{ARRIVES}test_norms_of_layers_are_asked_for_unless_that_is_turned_off",
        f"{WORKER}test_norms_of_types_of_layers_are_told_with_each_pass_where_they_are_asked_for",
    ),
    "log_router_stats": (f"{WORKER}test_routers_are_told_of_with_the_pass_that_they_chose_in",),
    "worker_bind_host": (BOUND,),
    "worker_bind_port": (BOUND,),
    "worker_bind_address": (BOUND,),
    "engine_connect_host": (
        BOUND,
        f"{LAUNCHER}test_an_engine_reaches_every_address_by_loopback_unless_it_is_told_another",
    ),
    "worker_connection_timeout": (
        ENGINE,
        f"{RECOVERY}test_workers_that_are_silent_are_taken_for_lost",
        f"{LAUNCHER}test_an_engine_elsewhere_reads_where_workers_are_and_what_they_know",
    ),
    "worker_max_retries": (
        ENGINE,
        f"{RECOVERY}test_an_operation_that_was_lost_is_tried_again_as_often_as_is_written",
    ),
    "worker_max_restarts": (
        ENGINE,
        f"{ARRIVES}test_workers_are_started_again_as_often_as_is_written",
        f"{RECOVERY}test_workers_that_never_do_a_work_are_given_up",
    ),
    "sync_inference_method": (REFUSED,),
    "pass_env": (f"{LAUNCHER}test_workers_get_variables_that_are_named_and_no_other_secrets",),
    "sync_after_step": (
        OF_API,
        "scheduler/test_destinations.py::test_weights_are_sent_after_each_step_where_that_is_written",
        "api/test_xorl_clients.py::test_a_step_asks_for_its_weights_to_be_sent_where_that_is_written",
    ),
    "sync_allowed_hosts": (
        ENGINE,
        ASSEMBLING,
        f"{ARRIVES}test_servers_elsewhere_are_added_only_where_they_are_allowed",
    ),
    "api_host": (
        f"{ARRIVES}test_the_api_listens_where_that_is_written",
        f"{LAUNCHER}test_other_machines_are_let_in_only_with_keys",
    ),
    "api_port": (f"{ARRIVES}test_the_api_listens_where_that_is_written",),
    "api_keys_file": (
        f"{LAUNCHER}test_other_machines_are_let_in_only_with_keys",
        f"{API}test_without_a_key_nobody_is_let_in",
    ),
    "max_connections": (
        OF_API,
        "api/test_connections.py::test_half_open_connections_keep_nobody_out",
    ),
    "max_pending_requests": (OF_API, f"{API}test_an_owner_waits_for_so_many_futures_and_no_more"),
    "max_request_mb": (OF_API, f"{API}test_a_body_that_is_too_long_is_refused_packed_or_not"),
    "requests_per_minute": (
        OF_API,
        f"{API}test_more_than_a_minutes_requests_are_told_to_come_later_but_not_heartbeats",
    ),
    "operation_timeout": (
        ENGINE,
        OF_API,
        LIMITS,
        "api/test_xorl_clients.py::test_what_takes_too_long_is_told_and_not_begun",
        f"{RECOVERY}test_an_operation_that_takes_too_long_is_given_up",
    ),
    "future_ttl": (
        OF_API,
        "api/test_futures.py::test_a_result_is_kept_for_its_time_and_gone_then",
    ),
    "sequence_gap_timeout": (
        ENGINE,
        "scheduler/test_order.py::test_a_gap_is_waited_for_and_then_given_up_by_the_one_that_waits",
        "scheduler/test_order.py::test_a_gap_fails_the_ask_that_waits_and_order_goes_on",
    ),
    "nproc_per_node": (
        RANKS,
        f"{CONFIG}test_there_are_as_many_workers_as_parallel_sizes_multiply_to",
    ),
    "nnodes": (RANKS,),
    "node_rank": (RANKS,),
    "master_addr": (RANKS,),
    "master_port": (RANKS,),
    "stop_timeout": (
        ENGINE,
        ENDING,
        RANKS,
        "processes/test_stopping.py::test_what_could_not_be_saved_in_time_is_said_and_was_lost",
    ),
    "max_models": (ENGINE, MODELS),
    "max_owner_models": (ENGINE, MODELS),
    "max_sessions": (ENGINE, OPEN_SESSIONS),
    "max_owner_sessions": (ENGINE, OPEN_SESSIONS),
}
