"""Runs all stages or one stage in this process, without Prefect."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.api.load_config import load_config
from penstock.api.pipeline import build_local_runner, run_stages
from penstock.cli.console import Console, outcome_table
from penstock.cli.run_summary import print_summary
from penstock.config.loading.cli_overrides import Override
from penstock.config.schema.run import RunConfig
from penstock.core.cache.store import StageResult
from penstock.pipeline.plan import Plan, RebuildOptions, plan


@dataclass(frozen=True)
class Request:
    """A config file and the overrides of the command line."""

    file: Path
    overrides: tuple[Override, ...] = ()
    strict: bool = False
    """Refuse another tool's file with keys that are left out or doubtful."""

    def load(self) -> RunConfig:
        """The checked config."""
        return load_config(self.file, self.overrides, Console().say, strict=self.strict)

    def arguments(self, *left_out: str) -> list[str]:
        """The file and the overrides as arguments of a command, without the fields `left_out`."""
        settings = [f"{o.option}={o.text}" for o in self.overrides if o.name not in left_out]
        return [str(self.file), *settings]


def run_chain(request: Request, rebuild: RebuildOptions, console: Console) -> None:
    """Run every stage of the run, in order."""
    _run_stages(request, rebuild, console)
    print_summary(request.file, request.overrides, console)


def run_stage(
    request: Request, name: str, rebuild: RebuildOptions, console: Console, *, upstream: bool
) -> None:
    """Run one stage, and first the stages that it needs."""
    _run_stages(request, rebuild, console, name, upstream=upstream)


def run_tick(request: Request, console: Console) -> dict[str, Any]:
    """Run one tick of recurring fine-tuning as the section `release` says; print the decision."""
    from penstock.pipeline.recurring import tick

    run_stage = build_local_runner(console.say)

    def run_and_record(planned: Plan, name: str) -> StageResult:
        outcome = run_stage(planned, name, RebuildOptions())
        console.outcomes.append(outcome)
        return outcome

    decision = tick(request.load(), run_and_record, console.say)
    console.result(decision.line)
    return {"decision": decision.as_json()}


def _run_stages(
    request: Request,
    rebuild: RebuildOptions,
    console: Console,
    last: str | None = None,
    *,
    upstream: bool = True,
) -> None:
    planned = plan(request.load(), (last,) if last else None)
    runner = build_local_runner(console.say)
    for outcome in run_stages(
        planned, runner, rebuild, notify=console.say, last=last, upstream=upstream
    ):
        # One by one: the JSON object of a stage that fails has those before it.
        console.outcomes.append(outcome)
    console.result(outcome_table(console.outcomes))
