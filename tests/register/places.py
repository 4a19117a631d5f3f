"""Short names for tests that stand in the tables many times."""

STEP = "engine/step/test_step_fields.py::"
MEMORY = "engine/memory/test_memory_fields.py::"
RUN = "engine/step/test_run_fields.py::"
ATTENTION = "engine/step/test_attention_choice.py::"
MIXTURE = "engine/moe/test_mixture.py::"
LAYOUT = "engine/distributed/test_layout_fields.py::"
PIPELINE = "engine/distributed/test_pipeline.py::"
CHECKPOINT = "engine/checkpoint/test_checkpoint_fields.py::"
BEGUN = f"{CHECKPOINT}test_a_run_begins_with_as_much_of_a_checkpoint_as_is_written"
LOADER = "engine/data/test_loader.py::"
KEYS = "pipeline/test_keys.py::test_a_setting_changes_exactly_its_stages"
ARRIVES = "pipeline/test_projection.py::test_a_field_arrives_at_its_stage"
DATA = "stages/prepare/test_data_fields.py::"
PREPARE = "stages/prepare/test_prepare.py::"
INPUT = "stages/prepare/test_prepare_input.py::"
SLICES = "stages/prepare/test_slices.py::"
PIECES = f"{SLICES}test_every_record_is_in_exactly_one_piece_however_pieces_are_combined"
FIRST_PIECE = f"{SLICES}test_an_unset_shards_idx_is_the_first_piece_and_another_is_another"
SELECTION = "stages/prepare/test_selection.py::"
MEGATRON = "stages/prepare/test_megatron.py::"
MIXING = "stages/prepare/test_mixing.py::"
FORMATS = "stages/prepare/test_prepare_formats.py::"
MASKS = "stages/prepare/test_encode_masks.py::"
FITTING = "stages/prepare/test_encode_fitting.py::"
PACK = "stages/pack/test_pack.py::"
BRANCHED = "stages/pack/test_branched.py::"
EXPORT = "stages/export/test_export.py::"
CARD = "stages/export/test_card.py::"
HUB = "stages/push/test_push_hub.py::"
REMOTE = "pipeline/test_remote.py::"
COPY = "stages/push/test_push_copy.py::"
DATASET_HUB = "stages/push/test_push_dataset.py::"
SKIPPED = "pipeline/test_skip_prepare.py::"
RUNNER = "flows/test_task_runner.py::"
RELEASES = "pipeline/test_recurring.py::"
BETTER = "config/rules/test_release_rules.py::test_a_model_is_better_by_more_than_is_written"
LAUNCH = "stages/train/test_launch.py::"
ORDER = "rows/test_order.py::"
RULED = (
    "config/rules/test_rules.py::"
    "test_impossible_combination_is_refused_and_mended_by_what_is_proposed"
)
FLOAT8 = "engine/step/test_float8.py::"
ROUNDED = f"{FLOAT8}test_every_field_of_fp8_decides_what_is_rounded"
WINDOW = "config/rules/test_memory_rules.py::test_what_cannot_be_honoured_is_refused_with_what_can"
PROFILE = "engine/memory/test_profiling.py::"
PROFILED = (
    f"{PROFILE}test_a_trace_holds_the_steps_of_its_window_and_no_others",
    f"{PROFILE}test_nothing_is_recorded_unasked_or_past_the_window",
)
REFUSED = "config/test_fields.py::test_field_without_code_behind_it_is_refused"

OPTIM = "engine/step/test_optim_fields.py::"
KEEPING = f"{OPTIM}test_everything_is_computed_and_kept_in_the_precision_that_is_written"
SMALL_STEPS = (
    f"{OPTIM}test_steps_too_small_for_bf16_are_lost_unless_they_are_rounded_at_random_or_kept"
)
IN_LAYOUTS = (
    "engine/step/test_optimizers.py::"
    "test_twenty_steps_are_torchs_of_a_checkpoints_tensors_in_every_layout"
)
STEPPED = "optim/test_build.py::test_training_is_torchs_with_groups_made_by_hand"
OF_MUON = (
    IN_LAYOUTS,
    "optim/test_muon.py::test_twenty_steps_are_those_of_torch_of_each_matrix_by_itself",
)
OF_SCHEDULES = (
    "optim/test_schedule.py::test_the_schedule_is_the_references",
    "optim/test_schedule.py::test_the_schedule_is_that_of_transformers",
)
MORE_OF_SCHEDULES = (
    *("warmup_style", "hold_steps", "constant_steps", "num_cycles", "power", "gamma"),
    *("step_size", "d_model", "decay_rate", "timescale", "decay_steps", "decay_shape"),
)
RATES = (f"{STEP}test_the_optimizer_and_the_metrics_have_the_schedules_rate",)
DECAY = (f"{STEP}test_sgd_subtracts_the_gradient_and_decays_all_but_what_is_exempt",)
PASSES = (f"{STEP}test_a_step_takes_its_rows_in_as_many_passes_as_the_batch_sizes_say",)
AXES = (f"{LAYOUT}test_every_axis_takes_its_part",)
SHARDED = (f"{LAYOUT}test_weights_are_sharded_over_the_axes_that_are_named",)
KEPT = (
    f"{LAYOUT}test_gathered_weights_are_gathered_again_as_the_zero_stage_says",
    "engine/distributed/test_degrees.py::"
    "test_gathered_weights_are_kept_as_long_as_the_settings_say",
)
DEEPEP = ("engine/moe/test_deepep.py::test_settings_reach_deepep_and_change_no_number",)
STAGED = (f"{LAYOUT}test_layers_lie_in_stages_as_is_written",)
RECOMPUTED = (f"{MEMORY}test_what_is_recomputed_runs_twice_and_nothing_else",)
OFFLOADED = (
    "engine/memory/test_offload.py::"
    "test_layers_keep_on_the_gpu_what_the_limit_says_and_nothing_where_none_is_written",
    "engine/memory/test_offload.py::test_without_a_gpu_there_is_nowhere_to_move_them_from",
)
DETERMINISTIC = (
    "stages/train/test_launch.py::"
    "test_ranks_that_must_give_the_same_bits_find_it_in_their_environment"
)
EVALUATION = "engine/step/test_evaluation.py::"
EVALUATED = (f"{EVALUATION}test_a_run_evaluates_as_often_and_on_as_much_as_is_written",)
ANSWERED = (
    f"{EVALUATION}test_any_layout_tells_what_transformers_tells_and_answers_as_it_does",
    f"{EVALUATION}test_looking_at_a_model_changes_nothing_of_it",
)
BUDGET = "engine/checkpoint/test_budget.py::"
LONG_AS_WRITTEN = (f"{BUDGET}test_a_run_is_as_long_as_is_written_and_its_rate_falls_to_that_end",)
JUDGED = (
    f"{BUDGET}test_a_run_ends_when_nothing_gets_better_and_its_best_checkpoint_is_its_result",
    f"{BUDGET}test_a_run_that_goes_on_remembers_what_was_best_and_how_long_it_waited",
)
TOLD_BY_STEPS = "engine/step/test_told.py::"
NORMS = (
    f"{TOLD_BY_STEPS}test_norms_by_layer_are_those_of_whole_tensors_in_every_layout",
    f"{TOLD_BY_STEPS}test_norms_are_told_as_far_as_is_asked",
)
SHOWN = (f"{RUN}test_the_log_format_is_a_bar_or_lines_or_objects",)
TRACKERS = "stages/train/test_trackers.py::"
PACKAGES = "stages/train/test_tracker_packages.py::"
TRACKED = (
    f"{TRACKERS}test_weights_and_biases_is_used_where_there_is_a_login_unless_written",
    f"{TRACKERS}test_a_tracker_whose_package_is_missing_is_refused_before_any_work",
)
CALLED = (f"{TRACKERS}test_a_run_has_its_name_project_and_tags_there_and_no_secret",)
SAVED = (f"{RUN}test_checkpoints_are_saved_as_often_as_asked",)
FOLDERS = (
    "pipeline/test_saved_weights.py::test_the_last_checkpoint_holds_the_folders_that_were_asked_for"
)
ADAPTERS = f"{RUN}test_adapters_have_the_rank_the_targets_and_the_weight_that_are_written"
OF_LOSS = (
    "engine/losses/test_loss_fields.py::"
    "test_the_loss_is_what_is_written_and_computed_as_is_written",
)
FORMS = "engine/peft/test_adapter_fields.py::"
MERGING = "engine/peft/test_merging.py::"
OF_FORM = f"{FORMS}test_adapters_are_of_the_form_that_is_written"
GONE_ON_WITH = (
    f"{FORMS}test_an_adapter_of_peft_is_gone_on_with_exported_and_merged_as_it_is",
    f"{FORMS}test_an_adapter_that_does_not_agree_or_is_not_trained_on_is_refused",
)
OF_PEFT = (
    "adapters/test_lora.py::test_logits_and_every_gradient_are_those_of_peft",
    GONE_ON_WITH[0],
)
QLORA = "engine/peft/test_qlora.py::"
QUANTISED = f"{QLORA}test_codes_train_as_the_weights_that_they_stand_for"
NOISY = f"{QLORA}test_noise_is_that_of_a_step_and_of_training_alone"
DROPPED = (
    "engine/step/test_dropout.py::"
    "test_sites_drop_as_much_as_is_written_and_nothing_in_an_evaluation"
)
COMPUTED = (
    "engine/step/test_layer_kernels.py::"
    "test_layers_are_computed_with_what_is_written_and_in_what_is_written"
)
BALANCE = "engine/moe/test_balance.py::"
BALANCED = f"{BALANCE}test_losses_of_routers_are_asked_for_and_told_as_is_written"
WITHOUT_ROUTERS = f"{BALANCE}test_what_routers_cannot_do_is_refused_before_anything_starts"
REACHED = (
    "adapters/test_lora_experts.py::test_a_name_reaches_every_layer_that_bears_it",
    "adapters/test_lora_experts.py::test_what_experts_cannot_have_is_refused",
)
IN_COMMON = (f"{MIXTURE}test_experts_share_the_factors_that_are_written",)
MODEL = f"{RUN}test_the_model_is_the_one_that_is_configured"
SPLIT = ("engine/distributed/test_split.py::test_layers_are_split_as_the_reference_splits_them",)
PLACES = ("pipeline/test_projection.py::test_results_lie_where_the_paths_say",)
TOLD = f"{LAUNCH}test_torchrun_is_told_what_is_written"
GIVEN = f"{LAUNCH}test_every_process_gets_the_environment_and_is_started_again_as_often_as_written"
NAMED_COLUMN = "stages/prepare/test_formats_columns.py::test_a_column_is_read_where_its_field_says"
INSTRUCTION = f"{FORMATS}test_an_instruction_is_a_chat_where_the_tokenizer_has_a_template"
COLUMNS = f"{DATA}test_messages_and_text_are_taken_from_the_columns_that_are_named"
HUB_PART = f"{DATA}test_of_a_hub_data_set_the_named_part_is_read"
UNFIT = (
    "engine/distributed/test_degrees.py::"
    "test_a_wrong_layout_is_refused_before_launch_with_one_that_is_accepted"
)

ALONE = "test_fields.py::test_a_field_with_one_value_takes_no_other"
