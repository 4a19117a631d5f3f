"""The pipeline as Prefect flows: prepare, pack, train, export, push, whole or stage by stage.

`python flows/finetune.py CONFIG [--section.field value]`, or by deployment (see prefect.yaml).
Prefect watches, schedules and shows; the store decides what is already done, not Prefect's cache.
With `pipeline.task_runner`, slices are prepared by the workers of a Dask or Ray cluster.
"""
# ruff: noqa: E402

import sys
from pathlib import Path
from typing import cast

from penstock.core import env

# Read when Prefect is first imported. Nothing is sent anywhere, and a slow start is not a failure.
env.default(
    {
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PREFECT_CLIENT_MAX_RETRIES": "20",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
        "RAY_USAGE_STATS_ENABLED": "0",
        "DASK_DISTRIBUTED__LOGGING__DISTRIBUTED": "warning",
    }
)

import cloudpickle
from prefect import flow, get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run, task_run
from prefect.states import Completed

from cluster import num_shares, spread, task_runner
from penstock.cli.console import outcome_table
from penstock.config.load import load
from penstock.config.overrides import Override, split_overrides
from penstock.config.run import RunConfig
from penstock.core.errors import PenstockError
from penstock.core.stage import key_of, short
from penstock.core.store import Outcome
from penstock.plan import Plan, StageName, Wishes, bring_up, plan

# Workers of a cluster cannot import scripts that are known by their path: they are sent in full.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def _named_after_run() -> str:
    given = flow_run.parameters
    try:
        return _load(Path(given["config"]), given.get("overrides")).pipeline.name
    except PenstockError:
        return "misconfigured"  # the flow itself says in which way


def _named_after_stage_and_key() -> str:
    step = task_run.parameters["planned"].step(task_run.parameters["name"])
    return f"{step.stage.name} {short(key_of(step.stage))}"


@task(task_run_name=_named_after_stage_and_key, cache_policy=NO_CACHE, persist_result=False)
def realise(planned: Plan, name: StageName, wishes: Wishes) -> State[Outcome]:
    """Bring one stage up in the store, and say whether it was there already."""
    outcome = bring_up(planned.step(name), planned.run, wishes, get_run_logger().info)
    row = {"stage": name, "key": outcome.key, "status": outcome.status, "path": outcome.where}
    facts = {fact: str(value) for fact, value in outcome.facts.items()}
    create_table_artifact(key=f"penstock-{name}", table=[{**row, **facts}])
    reused = outcome.status == "cached"
    message = f"reused {outcome.where}" if reused else f"{outcome.status} -> {outcome.where}"
    return Completed(name="Cached" if reused else "Completed", message=message, data=outcome)


def chain(run: RunConfig, wishes: Wishes, *wanted: StageName) -> list[Outcome]:
    """Realise every step in order, in the flow's own thread: only there can it be cancelled."""
    runner = task_runner(run)
    planned = plan(run, wanted or None)
    if runner:
        spread(planned, runner, num_shares(run))
    outcomes: list[Outcome] = []
    for step in planned.steps:
        state = realise(planned, step.stage.name, wishes, return_state=True)
        outcomes.append(cast(Outcome, state.result()))
    get_run_logger().info("\n%s", outcome_table(outcomes))
    return outcomes


@flow(name="finetune", flow_run_name=_named_after_run, persist_result=False)
def finetune(
    config: Path, overrides: dict[str, str] | None = None, force: list[str] | None = None
) -> str:
    """Prepare, pack, train, export and, where a target is configured, push."""
    outcomes = chain(_load(config, overrides), Wishes(force=frozenset(force or ())))
    return outcomes[-1].where


@flow(name="prepare", flow_run_name=_named_after_run, persist_result=False)
def prepare(config: Path, overrides: dict[str, str] | None = None) -> str:
    """Load, template, tokenise and split the data."""
    return _until("prepare", config, overrides)


@flow(name="pack", flow_run_name=_named_after_run, persist_result=False)
def pack(config: Path, overrides: dict[str, str] | None = None) -> str:
    """Lay samples into rows, after what that needs."""
    return _until("pack", config, overrides)


@flow(name="train", flow_run_name=_named_after_run, persist_result=False)
def train(config: Path, overrides: dict[str, str] | None = None) -> str:
    """Train, after what that needs."""
    return _until("train", config, overrides)


@flow(name="export", flow_run_name=_named_after_run, persist_result=False)
def export(config: Path, overrides: dict[str, str] | None = None) -> str:
    """Export, after what that needs."""
    return _until("export", config, overrides)


@flow(name="push", flow_run_name=_named_after_run, persist_result=False)
def push(config: Path, overrides: dict[str, str] | None = None) -> str:
    """Push, after what that needs."""
    return _until("push", config, overrides)


def _load(config: Path, overrides: dict[str, str] | None) -> RunConfig:
    return load(config, [Override(name, text) for name, text in (overrides or {}).items()])


def _until(name: StageName, config: Path, overrides: dict[str, str] | None) -> str:
    return chain(_load(config, overrides), Wishes(), name)[-1].where


if __name__ == "__main__":
    try:
        rest, written = split_overrides(sys.argv[1:])
        finetune(Path(rest[0]), {each.name: each.text for each in written})
    except PenstockError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
