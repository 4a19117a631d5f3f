"""Runs all stages or one stage in this process, without Prefect."""

from dataclasses import dataclass
from pathlib import Path

from penstock.api.load_config import load_config
from penstock.api.pipeline import build_local_runner, run_stages
from penstock.cli.console import Console, outcome_table
from penstock.cli.run_summary import print_summary
from penstock.config.loading.cli_overrides import Override
from penstock.config.schema.run import RunConfig
from penstock.pipeline.plan import RebuildOptions, plan


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


def run_chain(request: Request, rebuild: RebuildOptions, console: Console) -> None:
    """Run every stage of the run, in order."""
    _run_stages(request, rebuild, console)
    print_summary(request.file, request.overrides, console)


def run_stage(
    request: Request, name: str, rebuild: RebuildOptions, console: Console, *, upstream: bool
) -> None:
    """Run one stage, and first the stages that it needs."""
    _run_stages(request, rebuild, console, name, upstream=upstream)


def _run_stages(
    request: Request,
    rebuild: RebuildOptions,
    console: Console,
    last: str | None = None,
    *,
    upstream: bool = True,
) -> None:
    planned, run_stage = (
        plan(request.load(), (last,) if last else None),
        build_local_runner(console.say),
    )
    for outcome in run_stages(
        planned, run_stage, rebuild, notify=console.say, last=last, upstream=upstream
    ):
        console.outcomes.append(outcome)
    console.result(outcome_table(console.outcomes))
