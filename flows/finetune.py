"""Prefect flows of the whole pipeline and of each stage.

`python flows/finetune.py CONFIG [--section.field value]`, or as deployments (see prefect.yaml).
Prefect schedules, monitors and displays; the store, not Prefect's cache, decides what is reused.
With `pipeline.task_runner`, the workers of a Dask or Ray cluster tokenize the slices.
"""
# ruff: noqa: E402

import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

from penstock.core import env

# Prefect reads these at import: no telemetry, a long timeout for the start of a temporary server,
# and retries while the server is unreachable, or returns 500 because its database is.
env.default(
    {
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PREFECT_CLIENT_MAX_RETRIES": "20",
        "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
        # Prefect's default, pickle, executes what it reads.
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
        # By default each record that is logged outside of a flow run adds a warning.
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "RAY_USAGE_STATS_ENABLED": "0",
        "DASK_DISTRIBUTED__LOGGING__DISTRIBUTED": "warning",
    }
)

import cloudpickle
from prefect import Flow, flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run, task_run
from prefect.states import Cancelled, Completed

from cluster import build_task_runner, num_shares, tokenize_on_cluster
from overview import chat_command, show_overview
from parameters import ConfigFile, Forced, Overrides, build_run_title, load_run, parse_argv
from penstock.api.pipeline import RunStage, run_stages
from penstock.api.tables import outcome_table
from penstock.config.schema.run import RunConfig
from penstock.core.cache.stage import short, stage_key
from penstock.core.cache.store import StageResult
from penstock.core.errors import Interrupted, PenstockError
from penstock.core.process.retry import backoff_seconds, is_transient
from penstock.pipeline.plan import Plan, RebuildOptions, execute_stage, plan
from prefect_artifacts import (
    build_notify,
    forward_prepare_logs,
    log_notice,
    show_stage_result,
    show_training,
)
from prefect_server import require_server
from temporary_server import temporary_server
from training_log import Logger

# Workers of a cluster cannot import scripts that are loaded by path, so they are pickled by value.
for script in (
    *("overview", "parameters", "prefect_artifacts", "training_log", "training_progress"),
    __name__,
):
    cloudpickle.register_pickle_by_value(sys.modules[script])


Ending = str | State[str]
"""The location of the last result, or the state `Stopped`: not Prefect stopped training."""


def build_flow_run_name() -> str:
    """The flow run's name: the run's name and its overrides."""
    parameters = flow_run.parameters
    try:
        overrides = parameters.get("overrides")
        return build_run_title(load_run(Path(parameters["config"]), overrides), overrides)
    except PenstockError:
        return "misconfigured"  # the flow itself reports the errors


def _build_task_run_name() -> str:
    planned, name = task_run.parameters["planned"], task_run.parameters["name"]
    verb = "evaluate" if name == "train" and planned.run.train.eval_only else name
    return f"{verb} {short(stage_key(planned.step(name).stage))}"


# NO_CACHE: Prefect's policy INPUTS (3.8.8) is not scoped to a task and sees no files, and its lock
# file blocks for ever after kill -9.
@task(task_run_name=_build_task_run_name, cache_policy=NO_CACHE, persist_result=False)
def run_stage(planned: Plan, name: str, rebuild: RebuildOptions) -> State[StageResult]:
    """Run one stage, or reuse its result; the state is `Cached` if it was reused."""
    step, called, logger = planned.step(name), planned.run.pipeline.name, get_run_logger()
    try:
        shown = show_training(step.path, called, logger) if name == "train" else nullcontext()
        with shown, forward_prepare_logs(logger):
            outcome = execute_stage(step, planned.run, rebuild, build_notify(name, called, logger))
    except Interrupted as stopped:
        # Returned: of an exception Prefect makes the state Failed, with a traceback in the log.
        return Cancelled(name="Stopped", message=str(stopped))
    show_stage_result(outcome, called, logger)
    reused = outcome.status == "cached"
    message = f"reused {outcome.where}" if reused else f"{outcome.status} -> {outcome.where}"
    return Completed(name="Cached" if reused else "Completed", message=message, data=outcome)


def run_stage_with_retries(planned: Plan, name: str, rebuild: RebuildOptions) -> StageResult:
    """Run one stage as a task with retries after transient errors. Raises what the stage raises."""
    options = planned.run.pipeline
    persistent = run_stage.with_options(
        retries=options.retries,
        retry_delay_seconds=backoff_seconds(options.retries, options.retry_delay) or 0,
        retry_condition_fn=_is_transient_failure,
    )
    # Called, not submitted: in a thread of a task runner no signal handler could be set, and a
    # cancelled flow would leave torchrun running. Prefect's timeout_seconds would leave it, too.
    state = persistent(planned, name, rebuild, return_state=True)
    # `result` would raise CancelledRun, which is no PenstockError: a stop would look like a bug.
    if state.is_cancelled():
        raise Interrupted(state.message or "", signal.SIGTERM)
    return cast(StageResult, state.result())


def _is_transient_failure(_task: object, _run: object, state: State[StageResult]) -> bool:
    return isinstance(state.data, BaseException) and is_transient(state.data)


def build_stage_runner(run: RunConfig, logger: Logger) -> RunStage:
    """A function that runs a stage as a task, `prepare` after its slices are tokenized on the
    run's cluster, if it has one. Raises CapabilityError if the cluster's package is missing."""
    runner = build_task_runner(run)

    def run_as_task(planned: Plan, name: str, rebuild: RebuildOptions) -> StageResult:
        if runner and name == "prepare":
            with forward_prepare_logs(logger):
                tokenize_on_cluster(planned, runner, num_shares(run))
        return run_stage_with_retries(planned, name, rebuild)

    return run_as_task


def run_pipeline(
    run: RunConfig, rebuild: RebuildOptions, chat: Sequence[str], *stages: str
) -> list[StageResult]:
    """Run every stage in order, in the flow's own thread: only there can it be cancelled.

    `chat` is the command to chat with the model.
    """
    logger = get_run_logger()
    run_as_task, planned = build_stage_runner(run, logger), plan(run, stages or None)
    for name in rebuild.force:
        planned.step(name)  # raises for a stage that the run does not have

    with show_overview(planned, chat, logger) as outcomes:
        notify = partial(log_notice, logger=logger)
        # One by one, so that those before a failure are shown.
        for outcome in run_stages(planned, run_as_task, rebuild, notify=notify):
            outcomes.append(outcome)
    logger.info("\n%s", outcome_table(outcomes))
    return outcomes


@flow(name="finetune", flow_run_name=build_flow_run_name, persist_result=False)
def finetune(config: ConfigFile, overrides: Overrides = None, force: Forced = None) -> Ending:
    """All stages of the run: from prepare to export, or to push if it has a target."""
    return _run_flow(config, overrides, force)


def _build_stage_flow(stage: str) -> Flow[..., Ending]:
    """A flow that runs this stage and first the stages that it needs."""

    def bring(config: ConfigFile, overrides: Overrides = None, force: Forced = None) -> Ending:
        return _run_flow(config, overrides, force, stage)

    bring.__name__ = bring.__qualname__ = stage  # Prefect loads a flow by its name in this file
    about = f"Run {stage}, and first the stages that it needs."
    return flow(
        name=stage, description=about, flow_run_name=build_flow_run_name, persist_result=False
    )(bring)


prepare = _build_stage_flow("prepare")
encode = _build_stage_flow("encode")
pack = _build_stage_flow("pack")
reference = _build_stage_flow("reference")
train = _build_stage_flow("train")
export = _build_stage_flow("export")
push = _build_stage_flow("push")


def _run_flow(config: Path, overrides: Overrides, force: Forced, *stages: str) -> Ending:
    rebuild = RebuildOptions(force=frozenset(force or ()))
    try:
        run, chat = load_run(config, overrides), chat_command(config, overrides)
        return run_pipeline(run, rebuild, chat, *stages)[-1].where
    except Interrupted as stopped:
        return Cancelled(name="Stopped", message=str(stopped))


def run_from_command_line(pipeline_flow: Flow[..., Any], script: str) -> int:
    """Run a flow with the arguments of the script; returns the exit code."""
    try:
        arguments = parse_argv(sys.argv[1:], script)
        with nullcontext() if require_server() else temporary_server():
            ended = pipeline_flow(*arguments, return_state=True)
        # As above: the exit code is that of a stop, and there is no traceback.
        if ended.is_cancelled():
            raise Interrupted(ended.message or "", signal.SIGTERM)
        ended.result()
    except PenstockError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(run_from_command_line(finetune, "finetune.py"))
