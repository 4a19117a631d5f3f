"""`penstock recur`: one tick of recurring fine-tuning, without Prefect."""

from typing import Any

from penstock.api.pipeline import build_local_runner
from penstock.cli.console import Console
from penstock.cli.run import Request
from penstock.core.cache.store import StageResult
from penstock.pipeline.plan import Plan, RebuildOptions
from penstock.pipeline.recurring import tick


def recur(request: Request, console: Console) -> dict[str, Any]:
    """Run one tick as the section `release` says, and print the decision."""
    run_stage = build_local_runner(console.say)

    def run_and_record(planned: Plan, name: str) -> StageResult:
        outcome = run_stage(planned, name, RebuildOptions())
        console.outcomes.append(outcome)
        return outcome

    decision = tick(request.load(), run_and_record, console.say)
    console.result(decision.line)
    return {"decision": decision.as_json()}
