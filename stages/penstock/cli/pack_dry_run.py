"""`penstock pack CONFIG --dry-run`: compares all packing methods."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from penstock.api.pipeline import build_local_runner
from penstock.cli.console import Console, outcome_table, table
from penstock.cli.run import Request
from penstock.core.cache.stage import stage_key
from penstock.core.cache.store import StageResult
from penstock.core.errors import ConfigError
from penstock.pack.compare import compare
from penstock.pack.stage import Pack
from penstock.pipeline.plan import RebuildOptions, plan, require_upstream


def compare_packing(
    request: Request, rebuild: RebuildOptions, console: Console, *, upstream: bool
) -> None:
    """Print rows, fill rate and padding of all methods on the prepared samples; pack nothing.

    The samples are prepared first if they are missing.
    """
    if "pack" in rebuild.force or rebuild.start == "pack":
        raise ConfigError(
            "--dry-run builds no pack stage.\n  Leave out --force pack or --from pack."
        )
    planned = plan(request.load(), ("pack",))
    for note in planned.notes:
        console.say(note)
    if upstream:
        console.outcomes.append(build_local_runner(console.say)(planned, "prepare", rebuild))
    else:
        require_upstream(planned, "pack")
    step, started = planned.step("pack"), time.monotonic()
    stage = step.stage
    assert isinstance(stage, Pack)
    figures = compare(stage.prepared.path, stage.resolved(), planned.run.data.pad_to_multiple_of)
    methods = [asdict(figure) for figure in figures]
    console.outcomes.append(
        StageResult(
            stage="pack",
            key=stage_key(stage),
            status="skipped",
            path=step.path,
            seconds=time.monotonic() - started,
            facts={"methods": methods},
            remote=step.remote,
        )
    )
    console.result(f"{outcome_table(console.outcomes)}\n\n{packing_table(methods)}")


def packing_table(methods: Sequence[Mapping[str, Any]]) -> str:
    """The figures of each packing method, one a row."""
    rows = [("split", "method", "rows", "bound", "fill", "padding", "")]
    rows += [
        (
            method["split"],
            method["method"],
            f"{method['rows']:,}",
            f"{method['bound']:,}",
            f"{method['fill']:.2%}",
            f"{method['padding']:.2%}",
            "as configured" if method["chosen"] else "",
        )
        for method in methods
    ]
    return table(rows)
