"""No setting is accepted and ignored: for each, the tests that fail when it does nothing.

A setting whose values are all refused but its default needs no entry; that it is refused is proven
in tests/config/test_fields.py.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

from penstock.config.availability import Later, mark_of
from penstock.config.shape import is_section, sections
from tests.config.values import faults_of

HERE = Path(__file__).parent

STEP = "engine/test_step_fields.py::"
MEMORY = "engine/test_memory_fields.py::"
RUN = "engine/test_run_fields.py::"
KEYS = "pipeline/test_keys.py::test_a_setting_changes_exactly_its_stages"
ARRIVES = "pipeline/test_projection.py::test_a_field_arrives_at_its_stage"
DATA = "stages/test_data_fields.py::"
PREPARE = "stages/test_prepare.py::"
INPUT = "stages/test_prepare_input.py::"
FORMATS = "stages/test_prepare_formats.py::"
PACK = "stages/test_pack.py::"
EXPORT = "stages/test_export.py::"
HUB = "stages/test_push_hub.py::"
COPY = "stages/test_push_copy.py::"
LAUNCH = "stages/test_launch.py::"
ORDER = "rows/test_order.py::"
REFUSED = "config/test_fields.py::test_field_without_code_behind_it_is_refused"

RATES = (f"{STEP}test_the_optimizer_and_the_metrics_have_the_schedules_rate",)
DECAY = (f"{STEP}test_sgd_subtracts_the_gradient_and_decays_all_but_what_is_exempt",)
PASSES = (f"{STEP}test_a_step_takes_its_rows_in_as_many_passes_as_the_batch_sizes_say",)
RECOMPUTED = (f"{MEMORY}test_what_is_recomputed_runs_twice_and_nothing_else",)
SAVED = (f"{RUN}test_checkpoints_are_saved_as_often_as_asked",)
FOLDERS = (
    "pipeline/test_saved_weights.py::test_the_last_checkpoint_holds_the_folders_that_were_asked_for"
)
ADAPTERS = f"{RUN}test_adapters_have_the_rank_the_targets_and_the_weight_that_are_written"
MODEL = f"{RUN}test_the_model_is_the_one_that_is_configured"
PLACES = ("pipeline/test_projection.py::test_results_lie_where_the_paths_say",)
TOLD = f"{LAUNCH}test_torchrun_is_told_what_is_written"
GIVEN = f"{LAUNCH}test_every_process_gets_the_environment_and_is_started_again_as_often_as_written"
INSTRUCTION = f"{FORMATS}test_an_instruction_is_a_chat_where_the_tokenizer_has_a_template"
COLUMNS = f"{DATA}test_messages_and_text_are_taken_from_the_columns_that_are_named"
HUB_PART = f"{DATA}test_of_a_hub_data_set_the_named_part_is_read"

ALONE = "test_fields.py::test_a_field_with_one_value_takes_no_other"
ONE_VALUE = (REFUSED,)
"""For a field that takes nothing but one meaning: there is no other that could be ignored."""

REGISTER: dict[str, dict[str, tuple[str, ...]]] = {
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
    "data": {
        "datasets": (f"{KEYS}[order of datasets]",),
        "test_datasets": (
            f"{PREPARE}test_test_datasets_are_validation_whole",
            f"{ARRIVES}[data.test_datasets]",
        ),
        "dataset_prepared_path": PLACES,
        "bad_rows_allowed": (
            f"{INPUT}test_bad_rows_above_the_limit_fail_with_their_places_and_below_it_are_counted",
            f"{ARRIVES}[data.bad_rows_allowed]",
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
        "eval_sample_packing": (
            f"{PACK}test_validation_is_packed_unless_it_is_not_to_be",
            f"{KEYS}[evaluation unpacked]",
        ),
        "dataloader_num_workers": (REFUSED, f"{RUN}test_a_wish_that_comes_to_nothing_is_told"),
        "dataloader_prefetch_factor": ONE_VALUE,
        "dataloader_pin_memory": (f"{MEMORY}test_rows_are_pinned_for_a_gpu_if_wanted",),
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
            "pipeline/test_projection.py::test_how_many_processes_prepare_is_what_is_written",
        ),
        "num_dataset_shards_to_save": (
            f"{PREPARE}test_exactly_as_many_slices_as_wanted_hold_all_records_in_order",
            f"{PACK}test_rerun_after_a_crash_keeps_finished_shards",
            f"{ARRIVES}[data.num_dataset_shards_to_save]",
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
        "max_seq_len": (
            f"{INPUT}test_long_samples_are_cut_and_those_left_without_a_target_are_dropped",
            f"{KEYS}[max_seq_len]",
        ),
        "field_messages": (COLUMNS, ARRIVES),
        "field_instruction": (INSTRUCTION, ARRIVES),
        "field_input": (INSTRUCTION, ARRIVES),
        "field_output": (INSTRUCTION, ARRIVES),
        "field_system": (
            INSTRUCTION,
            f"{FORMATS}test_a_system_prompt_of_its_own_column_comes_first_unless_there_is_one",
            ARRIVES,
        ),
        "field_text": (COLUMNS, ARRIVES),
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
            f"{PACK}test_rows_packed_tightly_are_not_left_sorted_by_length",
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
        "output_dir": PLACES,
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
    "pipeline": {
        "name": (
            "stages/test_report.py::test_what_users_write_is_shown_and_never_obeyed",
            "flows/test_finetune.py::test_stages_run_as_tasks_and_are_shown_as_cached_the_second_time",
        ),
        "stages": (
            "pipeline/test_projection.py::test_the_stages_that_are_listed_are_those_that_run",
        ),
        "artifacts_path": PLACES,
        "cache": (
            "pipeline/test_projection.py::test_a_cached_result_is_taken_or_built_again_as_the_config_says",
            "core/test_store.py::test_off_does_not_take_an_attempt_up",
        ),
    },
    "launch": {
        "nproc_per_node": (TOLD, GIVEN, f"{LAUNCH}test_auto_is_one_process_without_gpus"),
        "nnodes": (
            TOLD,
            f"{LAUNCH}test_two_machines_meet_and_count_their_processes_together",
        ),
        "node_rank": (TOLD,),
        "rdzv_endpoint": (
            TOLD,
            f"{LAUNCH}test_two_machines_meet_and_count_their_processes_together",
        ),
        "max_restarts": (TOLD, GIVEN),
        "timeout": (
            f"{LAUNCH}test_a_run_without_a_step_for_too_long_is_ended",
            f"{RUN}test_collective_operations_wait_as_long_as_a_step_may",
        ),
        "env": (GIVEN,),
    },
    "export": {
        "format": (ALONE,),
        "dtype": (
            f"{EXPORT}test_dtype_follows_the_base_model_and_a_written_one_wins",
            f"{ARRIVES}[export.dtype]",
        ),
        "max_shard_size": (
            f"{EXPORT}test_shards_hold_the_same_tensors_as_one_file",
            "config/test_fields.py::test_shard_size_counts_decimal_and_binary_units",
            f"{ARRIVES}[export.max_shard_size]",
        ),
        "merge_lora": (
            f"{EXPORT}test_without_merging_only_the_adapter_is_exported",
            f"{ARRIVES}[export.merge_lora]",
        ),
    },
    "push": {
        "repo_id": (
            f"{HUB}test_the_repository_holds_the_exported_bytes_and_a_second_push_commits_nothing",
            f"{ARRIVES}[push.repo_id]",
        ),
        "url": (
            f"{COPY}test_the_target_holds_the_exported_bytes_and_a_second_push_writes_nothing",
            "pipeline/test_projection.py::test_a_push_goes_to_the_url_that_is_written",
        ),
        "private": (
            f"{HUB}test_the_repository_holds_the_exported_bytes_and_a_second_push_commits_nothing",
            f"{HUB}test_a_repository_is_made_a_public_one_only_when_that_is_written",
            f"{ARRIVES}[push.private]",
        ),
        "revision": (
            f"{HUB}test_an_adapter_goes_below_the_model_or_alone_to_the_root",
            f"{ARRIVES}[push.revision]",
        ),
        "create_pr": (
            f"{HUB}test_a_pull_request_is_opened_once_and_main_stays",
            f"{ARRIVES}[push.create_pr]",
        ),
        "dry_run": (
            f"{HUB}test_a_dry_run_lists_all_asks_nobody_and_is_another_identity",
            f"{ARRIVES}[push.dry_run]",
        ),
    },
}


def available() -> set[str]:
    """Every field that may be given another value than its default."""
    found: set[str] = set()
    for place, section in sections().items():
        for name, field in section.model_fields.items():
            mark = mark_of(field)
            refused = isinstance(mark, Later) and not mark.allowed
            if not is_section(field.annotation) and not refused:
                found.add(f"{place}.{name}")
    return found


def registered() -> dict[str, tuple[str, ...]]:
    return {
        f"{place}.{name}": tests
        for place, fields in REGISTER.items()
        for name, tests in fields.items()
    }


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse((HERE / file).read_text())


def exists(test: str) -> bool:
    """Whether `file::test` or `file::test[case]` is there, told from the file's text alone."""
    file, _, rest = test.partition("::")
    name, _, case = rest.partition("[")
    if not (HERE / file).is_file():
        return False
    functions = {n.name for n in ast.walk(parsed(file)) if isinstance(n, ast.FunctionDef)}
    texts = {n.value for n in ast.walk(parsed(file)) if isinstance(n, ast.Constant)}
    return name in functions and (not case or case.removesuffix("]") in texts)


def test_every_available_field_has_a_test_that_would_miss_it():
    assert available() - registered().keys() == set()


def test_the_register_names_no_field_that_is_gone_or_not_available():
    assert registered().keys() - available() == set()


@pytest.mark.parametrize("field", registered())
def test_the_named_tests_exist(field):
    tests = registered()[field]
    assert tests
    assert [test for test in tests if not exists(test)] == []


@pytest.mark.parametrize("field", ["train.ckpt_manager", "export.format"])
def test_a_field_with_one_value_takes_no_other(field):
    place, _, name = field.partition(".")
    [line] = faults_of(**{place: {name: "other"}})
    assert line.startswith(f"{field}: ")
