"""Running stages: the whole chain or one of them, in this process, without Prefect."""

from dataclasses import dataclass
from pathlib import Path

from penstock.cli.console import Console, outcome_table
from penstock.cli.run_summary import print_summary
from penstock.config.loading.cli_overrides import Override
from penstock.config.loading.load import load
from penstock.config.schema.run import RunConfig
from penstock.core.cache.in_use import in_use
from penstock.core.cache.store import StageResult, find_cached
from penstock.core.process.retry import backoff_seconds, retry_with_backoff
from penstock.outputs import require_writable
from penstock.plan import Plan, RebuildOptions, StageName, execute_stage, plan, require_upstream


@dataclass(frozen=True)
class Request:
    """A config as the command line gave it."""

    file: Path
    overrides: tuple[Override, ...] = ()

    def load(self) -> RunConfig:
        """The checked config."""
        return load(self.file, self.overrides, Console().say)


def run_chain(request: Request, wishes: RebuildOptions, console: Console) -> None:
    """Every stage of the run, in order."""
    planned = plan(request.load())
    say_notes(planned, console)
    require_writable(planned)
    with in_use(planned.steps):
        for step in planned.steps:
            bring(planned, step.stage.name, wishes, console)
    console.result(outcome_table(console.outcomes))
    print_summary(request.file, request.overrides, console)


def run_stage(
    request: Request, name: StageName, wishes: RebuildOptions, console: Console, *, upstream: bool
) -> None:
    """One stage, after whatever it needs."""
    planned = plan(request.load(), (name,))
    say_notes(planned, console)
    if not upstream:
        require_upstream(planned, name)
    require_writable(planned)
    with in_use(planned.steps):
        for step in planned.steps:
            if upstream or step.stage.name == name:
                bring(planned, step.stage.name, wishes, console)
            if step.stage.name == name:
                break
    console.result(outcome_table(console.outcomes))


def say_notes(planned: Plan, console: Console) -> None:
    """What was told from the data, because it was not written."""
    for note in planned.notes:
        console.say(note)


def bring(planned: Plan, name: str, wishes: RebuildOptions, console: Console) -> StageResult:
    """One stage of the run, with what became of it said to the console."""
    step = planned.step(name)
    if name == "prepare" and planned.run.pipeline.task_runner and find_cached(step) is None:
        console.say(
            f"prepare: pipeline.task_runner ({planned.run.pipeline.task_runner}) is for Prefect's "
            "flows (flows/finetune.py); here slices are spread over processes of this machine"
        )
    wish = planned.run.pipeline
    outcome = retry_with_backoff(
        lambda: execute_stage(step, planned.run, wishes, console.say),
        backoff_seconds(wish.retries, wish.retry_delay),
        console.say,
    )
    console.outcomes.append(outcome)
    if outcome.status != "cached":
        console.say(f"{name}: {outcome.status} in {outcome.seconds:.1f}s -> {outcome.where}")
    if outcome.facts.get("dry_run"):
        for file in outcome.facts["files"]:
            console.say(f"  would send {file['path']} ({file['bytes']} bytes)")
    return outcome
