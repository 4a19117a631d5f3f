"""Runs the stages of a plan in order, with retries and log lines, and pins their results."""

import threading
from collections.abc import Callable, Collection, Generator

from penstock.config.schema.run import RunConfig
from penstock.core.cache.in_use import pin_artifacts
from penstock.core.cache.stage import short
from penstock.core.cache.store import StageResult, fetch_cached, find_cached
from penstock.core.errors import ConfigError
from penstock.core.extensions import STAGES
from penstock.core.process.retry import backoff_seconds, retry_with_backoff
from penstock.export.stage import Export
from penstock.pipeline.outputs import require_writable
from penstock.pipeline.plan import (
    Plan,
    RebuildOptions,
    execute_stage,
    require_upstream,
)

Notify = Callable[[str], None]
"""Receives each log line."""

RunStage = Callable[[Plan, str, RebuildOptions], StageResult]
"""Runs one stage of a plan, here or elsewhere."""

REUSE_ALL = RebuildOptions()
"""Reuses every complete result."""


def run_stages(
    planned: Plan,
    run_stage: RunStage,
    rebuild: RebuildOptions = REUSE_ALL,
    *,
    notify: Notify,
    last: str | None = None,
    upstream: bool = True,
) -> Generator[StageResult]:
    """Run the stages of the plan one after the other, each with `run_stage`; yields each result.

    `last` is the stage to end with; with `upstream` false only this stage runs. The results of the
    plan cannot be pruned meanwhile.
    Before any work, raises ConfigError for folders that are not writable and CapabilityError for a
    push without a login; then whatever the stages raise. Of a plan that only lists a push no stage
    is built.
    """
    for note in planned.notes:
        notify(note)
    if planned.lists_push:
        yield _list_push(planned, run_stage, rebuild, notify)
        return
    if last and not upstream:
        require_upstream(planned, last)
    require_writable(planned)
    # CPython runs signal handlers in the main thread alone; SIGALRM keeps pipeline.timeouts.
    require_main_thread(planned.run)
    with pin_artifacts(planned.used):
        for step in planned.steps:
            name = step.stage.name
            if upstream or name == last:
                yield run_stage(planned, name, rebuild)
            if name == last:
                return


def build_local_runner(notify: Notify) -> RunStage:
    """A function that runs stages on this machine, without Prefect, with the retries of the run."""

    def run_stage(planned: Plan, name: str, rebuild: RebuildOptions) -> StageResult:
        step, options = planned.step(name), planned.run.pipeline
        if name == "prepare" and options.task_runner and find_cached(step) is None:
            notify(
                f"prepare: pipeline.task_runner ({options.task_runner}) is for Prefect's "
                "flows (flows/finetune.py); here slices are spread over processes of this machine"
            )
        result = retry_with_backoff(
            lambda: execute_stage(step, planned.run, rebuild, notify),
            backoff_seconds(options.retries, options.retry_delay),
            notify,
        )
        if result.status != "cached":
            notify(f"{name}: {result.status} in {result.seconds:.1f}s -> {result.where}")
        if result.facts.get("dry_run"):
            for file in result.facts["files"]:
                notify(f"  would send {file['path']} ({file['bytes']} bytes)")
        return result

    return run_stage


def _list_push(
    planned: Plan, run_stage: RunStage, rebuild: RebuildOptions, notify: Notify
) -> StageResult:
    """The dry run of push: the files of the export, or what it would have if it is not built."""
    rebuilt = sorted({*rebuild.force, *([rebuild.start] if rebuild.start else [])} - {"push"})
    if rebuilt:
        raise ConfigError(
            f"push.dry_run builds nothing, and {', '.join(rebuilt)} would be built again.\n"
            "  Leave --force and --from out, or run penstock export with them first."
        )
    push, export = planned.step("push"), planned.step("export")
    if fetch_cached(export, planned.run.pipeline.verify, notify) is not None:
        with pin_artifacts(planned.used):
            return run_stage(planned, "push", rebuild)
    from penstock.push.contents import target_folders

    assert isinstance(export.stage, Export)
    names = export.stage.folder_names(has_adapter=planned.run.lora.enable_lora)
    folders = target_folders({name: name for name in names})
    missing = [step.stage.name for step in planned.steps[:-1] if find_cached(step) is None]
    target = planned.run.push.repo_id or planned.run.push.url
    notify(f"push: a dry run builds nothing, and these are not built yet: {', '.join(missing)}")
    for name, folder in folders.items():
        notify(f"  would send {name}/ of the export to {target}{f'/{folder}' if folder else ''}")
    facts = {"target": target, "dry_run": True, "files": [], "bytes": 0, "folders": folders}
    facts["missing"] = missing
    return StageResult("push", short(push.artifact.key), "skipped", push.path, 0.0, facts)


def rebuild_options(
    force: str | Collection[str], start: str | None, *, fresh: bool = False
) -> RebuildOptions:
    """Which stages to build again. Raises ConfigError for an unknown stage."""
    forced = frozenset([force] if isinstance(force, str) else force)
    for name in (*forced, *([start] if start else [])):
        if name not in STAGES.names:
            raise ConfigError(f"{name} is not a stage.\n  Stages are {', '.join(STAGES.names)}.")
    return RebuildOptions(forced, start, fresh)


def require_main_thread(run: RunConfig) -> None:
    """Raise ConfigError for `pipeline.timeouts` outside the main thread: they use SIGALRM."""
    thread = threading.current_thread()
    if run.pipeline.timeouts and thread is not threading.main_thread():
        raise ConfigError(
            f"pipeline.timeouts cannot be kept in the thread {thread.name}: a signal ends what "
            "takes too long, and signals reach the main thread alone.\n"
            "  Leave pipeline.timeouts out, or run the stages in the main thread."
        )
