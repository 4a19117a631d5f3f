"""`penstock recur`: one look at the sources, and what follows from it, without Prefect."""

from typing import Any

from penstock.api.pipeline import build_local_runner
from penstock.cli.console import Console
from penstock.cli.run import Request
from penstock.core.cache.store import StageResult
from penstock.plan import Plan, RebuildOptions, StageName
from penstock.recurring import tick


def recur(request: Request, console: Console) -> dict[str, Any]:
    """Do what the section `release` asks for, and say in a line what was decided."""
    bring = build_local_runner(console.say)

    def brought(planned: Plan, name: StageName) -> StageResult:
        outcome = bring(planned, name, RebuildOptions())
        console.outcomes.append(outcome)
        return outcome

    decision = tick(request.load(), brought, console.say)
    console.result(decision.line)
    return {"decision": decision.as_json()}
