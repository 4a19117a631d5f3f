"""The pipeline as Prefect flows, whole or stage by stage.

`python flows/finetune.py CONFIG [--section.field value]`, or by deployment (see prefect.yaml).
Prefect watches, schedules and shows; the store decides what is already done, not Prefect's cache.
With `pipeline.task_runner`, slices are prepared by the workers of a Dask or Ray cluster.
"""
# ruff: noqa: E402

import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

from penstock.core import env

# Read when Prefect is first imported. Nothing is sent anywhere, a slow start is not a failure, and
# a server is asked again that is away, or answers 500 because its database is.
env.default(
    {
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PREFECT_CLIENT_MAX_RETRIES": "20",
        "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
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

from cluster import num_shares, spread, task_runner
from overview import chat_command, overview_shown
from parameters import ConfigFile, Forced, Overrides, build_run_title, loaded, typed
from penstock.api.pipeline import bring_stages
from penstock.api.tables import outcome_table
from penstock.config.schema.run import RunConfig
from penstock.core.cache.stage import short, stage_key
from penstock.core.cache.store import StageResult
from penstock.core.errors import Interrupted, PenstockError
from penstock.core.process.retry import backoff_seconds
from penstock.core.remote.errors import is_transient
from penstock.plan import Plan, RebuildOptions, StageName, execute_stage, plan
from prefect_artifacts import log_notice, noticed, prepare_logged, show, training_shown

# Workers of a cluster cannot import scripts that are known by their path: they are sent in full.
for script in (
    *("overview", "parameters", "prefect_artifacts", "training_log", "training_progress"),
    __name__,
):
    cloudpickle.register_pickle_by_value(sys.modules[script])


Ending = str | State[str]
"""Where the last result lies, or `Stopped`: training was asked to stop by others than Prefect."""


def named_after_run() -> str:
    """What runs: the run's name, and what was laid over its file."""
    given = flow_run.parameters
    try:
        overrides = given.get("overrides")
        return build_run_title(loaded(Path(given["config"]), overrides), overrides)
    except PenstockError:
        return "misconfigured"  # the flow itself says in which way


def _named_after_stage_and_key() -> str:
    planned, name = task_run.parameters["planned"], task_run.parameters["name"]
    verb = "evaluate" if name == "train" and planned.run.train.eval_only else name
    return f"{verb} {short(stage_key(planned.step(name).stage))}"


@task(task_run_name=_named_after_stage_and_key, cache_policy=NO_CACHE, persist_result=False)
def realise(planned: Plan, name: StageName, wishes: RebuildOptions) -> State[StageResult]:
    """Bring one stage up in the store, and say whether it was there already."""
    step, called, logger = planned.step(name), planned.run.pipeline.name, get_run_logger()
    try:
        shown = training_shown(step.path, called, logger) if name == "train" else nullcontext()
        with shown, prepare_logged(logger):
            outcome = execute_stage(step, planned.run, wishes, noticed(name, called, logger))
    except Interrupted as stopped:
        return Cancelled(name="Stopped", message=str(stopped))
    show(outcome, called, logger)
    reused = outcome.status == "cached"
    message = f"reused {outcome.where}" if reused else f"{outcome.status} -> {outcome.where}"
    return Completed(name="Cached" if reused else "Completed", message=message, data=outcome)


def brought(planned: Plan, name: StageName, wishes: RebuildOptions) -> StageResult:
    """One stage, as a task that is tried again where its fault may pass. Raises what it raises."""
    wish = planned.run.pipeline
    persistent = realise.with_options(
        retries=wish.retries,
        retry_delay_seconds=backoff_seconds(wish.retries, wish.retry_delay) or 0,
        retry_condition_fn=_may_pass,
    )
    state = persistent(planned, name, wishes, return_state=True)
    if state.is_cancelled():
        raise Interrupted(state.message or "", signal.SIGTERM)
    return cast(StageResult, state.result())


def _may_pass(_task: object, _run: object, state: State[StageResult]) -> bool:
    return isinstance(state.data, BaseException) and is_transient(state.data)


def chain(
    run: RunConfig, wishes: RebuildOptions, chat: Sequence[str], *wanted: StageName
) -> list[StageResult]:
    """Realise every step in order, in the flow's own thread: only there can it be cancelled.

    `chat` is the command that talks to the model.
    """
    runner, logger = task_runner(run), get_run_logger()
    planned = plan(run, wanted or None)
    for name in wishes.force:
        planned.step(name)  # raises for one that would be ignored

    def bring(planned: Plan, name: StageName, wishes: RebuildOptions) -> StageResult:
        if runner and name == "prepare":
            with prepare_logged(logger):
                spread(planned, runner, num_shares(run))
        return brought(planned, name, wishes)

    with overview_shown(planned, chat, logger) as outcomes:
        done = bring_stages(planned, bring, wishes, notify=lambda line: log_notice(line, logger))
        for outcome in done:  # so that those before a failure are shown
            outcomes.append(outcome)
    logger.info("\n%s", outcome_table(outcomes))
    return outcomes


@flow(name="finetune", flow_run_name=named_after_run, persist_result=False)
def finetune(config: ConfigFile, overrides: Overrides = None, force: Forced = None) -> Ending:
    """All stages that the run lists: from prepare to export, or to push where it has a target."""
    return _bring(config, overrides, force)


def _ending_with(stage: StageName) -> Flow[..., Ending]:
    """A flow for that stage alone, and for what it needs."""

    def bring(config: ConfigFile, overrides: Overrides = None, force: Forced = None) -> Ending:
        return _bring(config, overrides, force, stage)

    bring.__name__ = bring.__qualname__ = stage  # by which Prefect finds it in this file
    about = f"Bring up {stage}, after what that needs."
    return flow(name=stage, description=about, flow_run_name=named_after_run, persist_result=False)(
        bring
    )


prepare = _ending_with("prepare")
pack = _ending_with("pack")
reference = _ending_with("reference")
train = _ending_with("train")
export = _ending_with("export")
push = _ending_with("push")


def _bring(config: Path, overrides: Overrides, force: Forced, *wanted: StageName) -> Ending:
    wishes = RebuildOptions(force=frozenset(force or ()))
    try:
        run, chat = loaded(config, overrides), chat_command(config, overrides)
        return chain(run, wishes, chat, *wanted)[-1].where
    except Interrupted as stopped:
        return Cancelled(name="Stopped", message=str(stopped))


def by_hand(which: Flow[..., Any], script: str) -> int:
    """Run a flow with what was typed behind the script's name; the exit status."""
    try:
        ended = which(*typed(sys.argv[1:], script), return_state=True)
        if ended.is_cancelled():
            raise Interrupted(ended.message or "", signal.SIGTERM)
        ended.result()
    except PenstockError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(by_hand(finetune, "finetune.py"))
