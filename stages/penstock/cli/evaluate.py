"""`penstock eval`: held-out prompts, asked of the exported model."""

from typing import Any

from penstock.cli.console import Console
from penstock.config.run import RunConfig
from penstock.core.errors import ConfigError, StageError
from penstock.core.store import Step, obtain
from penstock.plan import plan

SHOWN = 4
"""Sample answers that are printed."""
BATCH = 50


def evaluate_run(run: RunConfig, limit: int, console: Console) -> dict[str, Any]:
    """Print the share of exact answers, a few of them, and where the report lies.

    Raises ConfigError for a run without a validation split, StageError when it is not exported yet.
    """
    if not run.data.val_set_size and not run.data.test_datasets:
        raise ConfigError(
            "this run holds nothing out, so there is nothing to ask.\n"
            "  Write data.val_set_size or data.test_datasets."
        )
    planned = plan(run, ("export",))
    for step in planned.steps:
        _require(step)
    from penstock.evaluate.exact_match import exact_match

    prepared, exported = planned.step("prepare").artifact, planned.step("export").artifact
    folders = exported.facts["folders"]
    report = exact_match(
        exported.path / folders.get("hf", folders.get("adapter", "hf")),
        prepared,
        limit=limit,
        seed=run.train.seed,
        batch_size=BATCH,
    )
    lines = [
        f"{report.num_right} of {report.num_asked} held-out prompts right: {report.accuracy:.1%}"
    ]
    for sample in report.samples[:SHOWN]:
        mark = "right" if sample.right else f"wrong, expected {sample.expected!r}"
        lines.append(f"  {sample.prompt.strip()!r} -> {sample.answer!r} ({mark})")
    lines.append(f"report: {planned.step('train').path / 'report.html'}")
    lines.append(f"model:  {planned.step('train').path / 'hf'}")
    console.result("\n".join(lines))
    return {
        "accuracy": report.accuracy,
        "asked": report.num_asked,
        "right": report.num_right,
        "skipped": report.num_skipped,
        "samples": [vars(sample) for sample in report.samples],
    }


def _require(step: Step) -> None:
    if obtain(step) is None:
        raise StageError(
            f"{step.stage.name} has not been run for this config.\n  Run penstock run first."
        )
