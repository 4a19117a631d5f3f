"""The prepared data of a run, for commands that only read it."""

from dataclasses import dataclass

from penstock.cli.console import Console
from penstock.cli.run import Request
from penstock.config.schema.run import RunConfig
from penstock.core.cache.store import PlannedStage, get_or_build
from penstock.pipeline.plan import plan, require_upstream
from penstock.prepare.user_prepared import ExternalPrepared, use_external


@dataclass(frozen=True)
class Prepared:
    """The prepared data of a run."""

    run: RunConfig
    step: PlannedStage


def prepared_data(request: Request, console: Console, *, upstream: bool) -> Prepared:
    """The run's prepared data; it is prepared first if it is missing.

    Never pushes data to the hub and never rebuilds a result, whatever the config says.
    """
    planned = plan(request.load(), ("prepare",))
    for note in planned.notes:
        console.say(note)
    step = planned.step("prepare")
    if isinstance(step.stage, ExternalPrepared):
        outcome = use_external(step)
    else:
        if not upstream:
            require_upstream(planned, "this command")
        outcome = get_or_build(step, verify=planned.run.pipeline.verify, notify=console.say)
    console.outcomes.append(outcome)
    if outcome.status not in ("cached", "skipped"):
        console.say(f"prepare: {outcome.status} in {outcome.seconds:.1f}s -> {outcome.where}")
    return Prepared(planned.run, step)
