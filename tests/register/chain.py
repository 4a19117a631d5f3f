"""The chain of stages, its launch and its results."""

from tests.register.places import (
    ALONE,
    ARRIVES,
    BETTER,
    CARD,
    COPY,
    EXPORT,
    GIVEN,
    HUB,
    LAUNCH,
    PLACES,
    RELEASES,
    RUN,
    RUNNER,
    TOLD,
)

OF_CHAIN: dict[str, dict[str, tuple[str, ...]]] = {
    "pipeline": {
        "name": (
            "stages/report/test_report.py::test_what_users_write_is_shown_and_never_obeyed",
            "flows/test_finetune.py::test_a_deployed_run_is_named_after_what_runs_and_shows_its_stages_and_what_they_wait_for",
        ),
        "stages": (
            "pipeline/test_projection.py::test_the_stages_that_are_listed_are_those_that_run",
        ),
        "artifacts_path": PLACES,
        "cache": (
            "pipeline/test_projection.py::test_a_cached_result_is_taken_or_built_again_as_the_config_says",
            "core/test_store.py::test_off_does_not_take_an_attempt_up",
        ),
        "verify": (
            "pipeline/test_projection.py::test_a_result_is_verified_before_it_is_reused_as_the_config_says",
            "core/test_verify.py::test_what_was_verified_is_not_read_again_unless_always_is_written",
        ),
        "retries": (
            "pipeline/test_trying_again.py::test_a_lost_connection_is_tried_again_as_often_and_as_late_as_written",
        ),
        "retry_delay": (
            "pipeline/test_trying_again.py::test_a_lost_connection_is_tried_again_as_often_and_as_late_as_written",
        ),
        "timeouts": (
            "pipeline/test_trying_again.py::test_a_stage_that_takes_too_long_is_ended_and_resumed_by_the_next_start",
        ),
        "task_runner": (
            f"{RUNNER}test_a_cluster_is_that_of_the_address_or_one_of_as_many_workers_as_written",
            f"{RUNNER}test_a_package_that_is_not_installed_is_named_before_any_work",
        ),
        "task_runner_address": (
            f"{RUNNER}test_a_cluster_is_that_of_the_address_or_one_of_as_many_workers_as_written",
            "flows/test_finetune.py::test_two_dask_workers_prepare_every_slice_once_and_the_result_is_the_command_lines",
        ),
        "task_runner_workers": (
            f"{RUNNER}test_a_cluster_is_that_of_the_address_or_one_of_as_many_workers_as_written",
            f"{RUNNER}test_a_cluster_of_its_own_has_as_many_processes_as_written",
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
        "max_restarts": (
            TOLD,
            GIVEN,
            "pipeline/kills/test_killed_ranks.py::test_a_killed_rank_is_started_again_and_named_and_changes_no_weight",
        ),
        "timeout": (
            f"{LAUNCH}test_a_run_without_a_step_for_too_long_is_ended",
            "stages/train/test_hangs.py::test_a_rank_that_hangs_is_told_with_its_host_and_stack_and_all_are_killed",
            f"{RUN}test_collective_operations_wait_as_long_as_a_step_may",
        ),
        "stop_timeout": (TOLD, f"{LAUNCH}test_ranks_that_do_not_hear_are_killed_in_time"),
        "env": (GIVEN,),
        "pass_env": (f"{LAUNCH}test_ranks_get_the_secrets_that_they_need_and_no_others",),
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
        "quantise": (
            "stages/export/test_export_quantised.py::test_every_layer_is_the_quantised_one_and_what_is_no_layer_stays",
            f"{ARRIVES}[export.quantise]",
        ),
        "model_card": (
            f"{CARD}test_without_a_card_the_key_is_that_of_before_and_nothing_is_written",
            f"{ARRIVES}[export.model_card]",
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
    "release": {
        "name": (f"{RELEASES}test_the_pointer_follows_releases_and_rollbacks",),
        "train_when": (
            f"{RELEASES}test_a_model_is_trained_again_when_enough_is_new_and_only_then",
        ),
        "min_new_samples": (
            f"{RELEASES}test_a_model_is_trained_again_when_enough_is_new_and_only_then",
        ),
        "start_from": (f"{RELEASES}test_the_new_model_went_on_from_the_released_one",),
        "metric": (
            f"{RELEASES}test_both_models_are_compared_on_the_same_rows_and_the_better_one_stays",
            f"{RELEASES}test_adapters_go_on_from_the_released_adapter_beside_the_same_base",
        ),
        "mode": (BETTER,),
        "min_delta": (
            BETTER,
            f"{RELEASES}test_both_models_are_compared_on_the_same_rows_and_the_better_one_stays",
        ),
        "keep_runs": (f"{RELEASES}test_training_folders_of_earlier_models_go_where_few_are_kept",),
    },
}
