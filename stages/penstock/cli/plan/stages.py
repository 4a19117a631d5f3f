"""`penstock plan`: which stages are cached, partial, stale or missing, and why."""

from typing import Any

from penstock.api.status import StageStatus, stage_statuses
from penstock.cli.console import Console, table
from penstock.cli.inspect_commands import PlanOptions
from penstock.cli.plan.costs import costs
from penstock.cli.plan.long_samples import long_samples
from penstock.config.schema.run import RunConfig
from penstock.pipeline.outputs import find_unwritable, output_folders
from penstock.pipeline.plan import plan

THIS_MACHINE = PlanOptions()


def print_plan(
    run: RunConfig, console: Console, options: PlanOptions = THIS_MACHINE
) -> dict[str, Any]:
    """Print the state of each stage and the cost of training; returns the same as plain values."""
    planned = plan(run, for_this_machine=options.device_kind is None)
    for note in planned.notes:
        console.say(note)
    for refusal in find_unwritable(output_folders(run, run.stages)):
        console.say(f"warning: {refusal}")
    warnings = list(long_samples(planned))
    for warning in warnings:
        console.say(warning)
    verdicts = stage_statuses(planned)
    rows = [("stage", "key", "standing", "where")]
    rows += [(v.stage, v.key, v.standing, v.where) for v in verdicts]
    lines = [table(rows), *(line for verdict in verdicts for line in verdict.reasons)]
    text, values = costs(planned.run, planned.steps, options)
    console.result("\n".join([*lines, *([text] if text else [])]))
    stages = [_status_as_json(verdict) for verdict in verdicts]
    return {"plan": stages, "warnings": warnings, **values}


def _status_as_json(verdict: StageStatus) -> dict[str, Any]:
    return {
        "stage": verdict.stage,
        "key": verdict.key,
        "standing": verdict.standing,
        "path": verdict.where,
        "nearest": str(verdict.nearest) if verdict.nearest else None,
        "changed": [{"field": d.field, "here": d.here, "there": d.there} for d in verdict.changed],
        "stale_inputs": [
            {"input": c.name, "stage": c.stage, "then": c.then, "now": c.now}
            for c in verdict.stale_inputs
        ],
    }
