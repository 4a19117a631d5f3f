"""Running stages: the whole chain or one of them, in this process, without Prefect."""

from dataclasses import dataclass
from pathlib import Path

from penstock.api.load_config import load_config
from penstock.api.pipeline import bring_here, bring_stages
from penstock.cli.console import Console, outcome_table
from penstock.cli.run_summary import print_summary
from penstock.config.loading.cli_overrides import Override
from penstock.config.schema.run import RunConfig
from penstock.plan import RebuildOptions, StageName, plan


@dataclass(frozen=True)
class Request:
    """A config as the command line gave it."""

    file: Path
    overrides: tuple[Override, ...] = ()

    def load(self) -> RunConfig:
        """The checked config."""
        return load_config(self.file, self.overrides, Console().say)


def run_chain(request: Request, wishes: RebuildOptions, console: Console) -> None:
    """Every stage of the run, in order."""
    _bring(request, wishes, console)
    print_summary(request.file, request.overrides, console)


def run_stage(
    request: Request, name: StageName, wishes: RebuildOptions, console: Console, *, upstream: bool
) -> None:
    """One stage, after whatever it needs."""
    _bring(request, wishes, console, name, upstream=upstream)


def _bring(
    request: Request,
    wishes: RebuildOptions,
    console: Console,
    last: StageName | None = None,
    *,
    upstream: bool = True,
) -> None:
    planned, bring = plan(request.load(), (last,) if last else None), bring_here(console.say)
    for outcome in bring_stages(
        planned, bring, wishes, notify=console.say, last=last, upstream=upstream
    ):
        console.outcomes.append(outcome)
    console.result(outcome_table(console.outcomes))
