"""What is trained on."""

from tests.register.places import (
    ARRIVES,
    ATTENTION,
    BRANCHED,
    COLUMNS,
    DATA,
    DATASET_HUB,
    FIRST_PIECE,
    FITTING,
    FORMATS,
    HUB_PART,
    INPUT,
    INSTRUCTION,
    KEYS,
    LOADER,
    MASKS,
    MEGATRON,
    MEMORY,
    MIXING,
    NAMED_COLUMN,
    ORDER,
    PACK,
    PIECES,
    PLACES,
    PREPARE,
    REMOTE,
    RULED,
    SELECTION,
    SKIPPED,
    SLICES,
    STEP,
)

OF_DATA: dict[str, dict[str, tuple[str, ...]]] = {
    "data": {
        "datasets": (f"{KEYS}[order of datasets]",),
        "test_datasets": (
            f"{PREPARE}test_test_datasets_are_validation_whole",
            f"{ARRIVES}[data.test_datasets]",
        ),
        "dataset_prepared_path": (
            *PLACES,
            f"{REMOTE}test_data_and_results_in_a_bucket_give_the_rows_that_local_ones_give",
        ),
        "bad_rows_allowed": (
            f"{INPUT}test_bad_rows_above_the_limit_fail_with_their_places_and_below_it_are_counted",
            f"{ARRIVES}[data.bad_rows_allowed]",
        ),
        "mix_strategy": (
            f"{ORDER}test_every_random_epoch_draws_each_source_by_its_share_from_where_the_last_one_stopped",
            f"{ORDER}test_interleaving_stops_at_the_first_or_at_the_last_source_that_runs_out",
            f"{ARRIVES}[data.mix_strategy]",
        ),
        "weight_unit": (
            f"{MEGATRON}test_weights_may_be_shares_of_tokens",
            f"{ARRIVES}[data.weight_unit]",
        ),
        "samples_per_epoch": (
            f"{MIXING}test_sources_are_drawn_by_their_weights_and_the_facts_tell_it",
            f"{ORDER}test_a_random_epoch_has_as_many_samples_as_there_are_unless_it_is_written",
            f"{ARRIVES}[data.samples_per_epoch]",
        ),
        "deduplicate": (
            f"{SELECTION}test_of_equal_samples_the_first_one_stays",
            f"{SELECTION}test_no_validation_sample_is_trained_on_in_another_copy",
            f"{ARRIVES}[data.deduplicate]",
        ),
        "near_duplicate_threshold": (
            f"{SELECTION}test_near_duplicates_are_those_that_comparing_all_with_all_finds",
            f"{ARRIVES}[data.near_duplicate_threshold]",
        ),
        "decontaminate_datasets": (
            f"{SELECTION}test_samples_with_a_run_of_avoided_tokens_are_left_out_and_not_for_a_common_beginning",
            f"{MIXING}test_what_is_left_out_is_counted_and_told",
            f"{ARRIVES}[data.decontaminate_datasets]",
        ),
        "decontaminate_ngram": (
            f"{SELECTION}test_avoided_samples_shorter_than_a_run_leave_nothing_out",
            f"{ARRIVES}[data.decontaminate_ngram]",
        ),
        "truncation_mode": (
            f"{FITTING}test_a_long_sample_loses_what_its_mode_says",
            f"{FITTING}test_the_fewest_oldest_turns_are_dropped_that_make_a_conversation_fit",
            f"{ARRIVES}[data.truncation_mode]",
        ),
        "max_prompt_len": (
            f"{FITTING}test_a_long_sample_loses_what_its_mode_says",
            f"{ARRIVES}[data.max_prompt_len]",
        ),
        "train_on_prompt": (
            f"{MASKS}test_a_trained_prompt_reaches_up_to_the_last_trained_token",
            f"{ARRIVES}[data.train_on_prompt]",
        ),
        "train_on_turns": (
            f"{MASKS}test_of_the_assistants_turns_those_that_are_wanted_are_trained",
            f"{ARRIVES}[data.train_on_turns]",
        ),
        "chat_template": (
            "stages/prepare/test_encode_templates.py::test_turns_that_qwen3_changes_are_trained_as_trls_template_has_them",
            "stages/prepare/test_encode_templates.py::test_qwen3s_changed_turns_are_unusable_as_published",
            f"{ARRIVES}[data.chat_template]",
        ),
        "add_eos": (
            f"{FORMATS}test_text_may_be_in_parts_and_its_end_be_left_out_or_untrained",
            f"{ARRIVES}[data.add_eos]",
        ),
        "mask_eos_in_loss": (
            f"{FORMATS}test_text_may_be_in_parts_and_its_end_be_left_out_or_untrained",
            f"{MASKS}test_of_the_assistants_turns_those_that_are_wanted_are_trained",
            f"{ARRIVES}[data.mask_eos_in_loss]",
        ),
        "select_columns": (
            f"{INPUT}test_selected_columns_are_the_only_ones_there",
            f"{KEYS}[select_columns]",
        ),
        "sample_packing_method": (
            f"{PACK}test_real_rows_keep_their_counts_from_stage_to_stage",
            f"{DATA}test_only_samples_of_one_group_share_a_row",
            f"{KEYS}[packing method]",
        ),
        "sample_packing_sequence_len": (
            f"{PACK}test_every_document_is_in_one_row_whole_and_shifted_once",
            f"{KEYS}[packing length]",
        ),
        "sample_packing_group_size": (
            f"{DATA}test_only_samples_of_one_group_share_a_row",
            f"{ARRIVES}[data.sample_packing_group_size]",
        ),
        "sample_packing_sequentially": (f"{KEYS}[forced sequential]",),
        "sample_packing_mp_start_method": (
            f"{PACK}test_as_many_processes_write_as_there_is_work_for_started_as_written",
            "pipeline/test_projection.py::test_processes_that_pack_are_started_as_is_written",
        ),
        "eval_sample_packing": (
            f"{PACK}test_validation_is_packed_unless_it_is_not_to_be",
            f"{KEYS}[evaluation unpacked]",
        ),
        "share_prompts": (
            f"{BRANCHED}test_every_answer_follows_its_prompt_whether_that_is_shared_or_not",
            "models/test_branching.py::test_shared_prompts_change_nothing_of_what_is_learnt",
            f"{ATTENTION}test_answers_that_share_a_prompt_go_where_one_is_hidden_from_the_other",
            f"{ARRIVES}[data.share_prompts]",
        ),
        "dataloader_num_workers": (
            f"{LOADER}test_rows_are_loaded_the_same_by_any_number_of_processes_that_read_as_far_ahead_as_written",
        ),
        "dataloader_prefetch_factor": (
            f"{LOADER}test_rows_are_loaded_the_same_by_any_number_of_processes_that_read_as_far_ahead_as_written",
            f"{LOADER}test_a_written_distance_starts_the_documented_number_of_processes",
        ),
        "dataloader_pin_memory": (
            f"{LOADER}test_rows_are_pinned_only_where_a_gpu_copies_them",
            f"{MEMORY}test_rows_are_pinned_for_a_gpu_if_wanted",
        ),
        "isolate_samples": (
            "engine/data/test_joined_samples.py::test_samples_see_what_is_before_them_in_their_row_if_that_is_written",
            f"{KEYS}[samples that see each other]",
            f"{RULED}[compared by what they are worth alone]",
        ),
        "dataloader_drop_last": (
            f"{STEP}test_rows_that_do_not_fill_a_step_are_left_out_or_not",
            f"{KEYS}[last batch]",
        ),
        "pad_to_multiple_of": (f"{STEP}test_rows_are_padded_no_further_than_asked",),
        "val_set_size": (
            f"{PREPARE}test_validation_and_training_are_all_samples_and_share_none",
            f"{KEYS}[val_set_size]",
        ),
        "shuffle_merged_datasets": (
            f"{ORDER}test_shuffling_after_merging_mixes_data_sets_and_another_seed_mixes_otherwise",
            f"{KEYS}[shuffle_merged_datasets]",
        ),
        "shuffle_before_merging_datasets": (
            f"{ORDER}test_shuffling_before_merging_keeps_data_sets_apart_and_leaves_a_single_one_alone",
            f"{KEYS}[shuffle_before_merging]",
        ),
        "dataset_num_proc": (
            f"{DATA}test_slices_are_spread_over_as_many_processes_as_written",
            "pipeline/test_projection.py::test_how_many_processes_prepare_and_pack_is_what_is_written",
        ),
        "num_dataset_shards_to_save": (
            f"{MIXING}test_files_cut_otherwise_hold_several_sources_and_are_read_by_datasets",
            f"{PACK}test_rerun_after_a_crash_keeps_finished_shards",
            f"{ARRIVES}[data.num_dataset_shards_to_save]",
        ),
        "dataset_shard_num": (PIECES, f"{ARRIVES}[data.dataset_shard_num]"),
        "dataset_shard_idx": (PIECES, f"{ARRIVES}[data.dataset_shard_idx]"),
        "skip_prepare_dataset": (
            f"{SKIPPED}test_data_is_taken_from_the_root_and_what_follows_keeps_its_key_without_any_source",
            f"{SKIPPED}test_tokens_of_another_program_are_packed_as_a_source_of_tokens_is",
        ),
        "push_dataset_to_hub": (
            f"{DATASET_HUB}test_a_run_pushes_what_it_prepared_and_its_seal_does_not_know",
            f"{DATASET_HUB}test_load_dataset_gives_every_pushed_key_as_it_was_prepared",
        ),
        "hf_use_auth_token": (
            f"{DATASET_HUB}test_the_login_goes_to_the_hub_as_written",
            f"{DATASET_HUB}test_records_of_the_hub_are_read_without_the_login_if_so_written",
            f"{DATASET_HUB}test_without_a_login_or_offline_nothing_begins",
        ),
    },
    "data.datasets[]": {
        "path": (
            "core/test_source.py::test_what_cannot_be_found_is_named_as_it_was_typed",
            f"{ARRIVES}[data.datasets[].path]",
        ),
        "type": (COLUMNS, f"{ARRIVES}[data.datasets[].type]"),
        "name": (HUB_PART, f"{ARRIVES}[data.datasets[].name]"),
        "split": (
            HUB_PART,
            "core/test_source.py::test_files_named_after_splits_are_not_mixed",
            f"{ARRIVES}[data.datasets[].split]",
        ),
        "revision": (
            "core/test_source.py::test_a_commit_needs_no_network_and_its_other_fields_are_identity",
            f"{ARRIVES}[data.datasets[].revision]",
        ),
        "trust_remote_code": (
            "config/test_load.py::test_every_fault_is_told_at_once_with_its_line",
        ),
        "data_files": (
            HUB_PART,
            "core/test_source.py::test_a_folder_gives_its_data_files_sorted_and_data_files_keep_the_users_order",
            f"{KEYS}[data_files]",
        ),
        "ds_type": (
            f"{DATA}test_files_of_unknown_names_are_read_as_ds_type_says",
            f"{ARRIVES}[data.datasets[].ds_type]",
        ),
        "splits_string": (
            f"{MEGATRON}test_a_source_reads_the_documents_of_its_split_alone",
            f"{MEGATRON}test_a_run_of_a_foreign_file_is_planned_on_the_documents_of_its_splits",
            f"{ARRIVES}[data.datasets[].splits_string]",
        ),
        "streaming": (
            f"{PREPARE}test_a_hub_data_set_is_read_at_its_commit_through_datasets",
            f"{ARRIVES}[data.datasets[].streaming]",
        ),
        "shards": (PIECES, FIRST_PIECE, f"{ARRIVES}[data.datasets[].shards]"),
        "shards_idx": (PIECES, FIRST_PIECE, f"{ARRIVES}[data.datasets[].shards_idx]"),
        "preprocess_shards": (
            PIECES,
            f"{SLICES}test_a_data_set_is_prepared_in_as_many_slices_as_wanted_whatever_its_size",
            f"{ARRIVES}[data.datasets[].preprocess_shards]",
        ),
        "weight": (
            f"{MIXING}test_sources_are_drawn_by_their_weights_and_the_facts_tell_it",
            f"{MIXING}test_a_source_of_weight_0_is_not_even_read",
            f"{ARRIVES}[data.datasets[].weight]",
        ),
        "max_samples": (
            f"{SELECTION}test_of_a_source_only_the_first_so_many_samples_are_used",
            f"{ARRIVES}[data.datasets[].max_samples]",
        ),
        "max_seq_len": (
            f"{INPUT}test_long_samples_are_cut_and_those_left_without_a_target_are_dropped",
            f"{KEYS}[max_seq_len]",
        ),
        "field_messages": (COLUMNS, NAMED_COLUMN, ARRIVES),
        "field_instruction": (INSTRUCTION, NAMED_COLUMN, ARRIVES),
        "field_input": (INSTRUCTION, NAMED_COLUMN, ARRIVES),
        "field_output": (INSTRUCTION, NAMED_COLUMN, ARRIVES),
        "field_system": (INSTRUCTION, NAMED_COLUMN, ARRIVES),
        "field_text": (COLUMNS, ARRIVES),
        **{
            f"field_{side}_score": (
                "stages/prepare/test_formats_answers.py::test_scores_are_read_where_their_columns_are_named",
                "stages/pack/test_branched.py::test_the_gap_between_scores_goes_with_its_pair",
                ARRIVES,
            )
            for side in ("chosen", "rejected")
        },
        **{
            f"field_{name}": (NAMED_COLUMN, ARRIVES)
            for name in ("tools", "prompt", "chosen", "rejected", "completion", "label")
        },
    },
}
