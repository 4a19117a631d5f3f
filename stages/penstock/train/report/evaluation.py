"""Evaluation section of a report: scores of `penstock eval`, and sample completions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.train.report.format import number, share, when
from penstock.train.report.read_run import RunRecord

Row = tuple[str, ...]


@dataclass(frozen=True)
class EvaluationSection:
    """The content of the section; empty if only the command is shown."""

    figures: list[tuple[str, str]]
    """Metrics of held-out prompts."""
    answers: list[Mapping[str, Any]]
    """Sample completions: `prompt`, `answer`, `expected` and whether that is `right`."""
    tasks: list[Row]
    """Harness task scores; the first row is the heading."""
    command: str
    """The command that runs an evaluation, if there has been none."""


def build_evaluation_section(run: RunRecord) -> EvaluationSection | None:
    """None if there was no evaluation and none is possible."""
    held_out, tasks = run.eval_results["held_out"], run.eval_results["tasks"]
    can_be_asked = run.state == "finished" and run.holds_out and not run.config.train.eval_only
    if not held_out and not tasks and not can_be_asked:
        return None
    return EvaluationSection(
        figures=_figures(held_out) if held_out else [],
        answers=held_out["samples"] if held_out else [],
        tasks=[("task", "metric", "value", "standard error"), *map(_task, tasks)] if tasks else [],
        command="" if held_out or not can_be_asked else f"penstock eval {run.folder}",
    )


def _figures(held_out: Mapping[str, Any]) -> list[tuple[str, str]]:
    right, count, part = held_out["right"], held_out["asked"], held_out["accuracy"]
    error = math.sqrt(part * (1 - part) / count)
    pattern = held_out["pattern"]
    return [
        ("exact match", f"{right:,} of {count:,}, {share(part)}"),
        ("standard error", share(error)),
        ("compared", f"the last match of {pattern}" if pattern else "the whole completion"),
        ("evaluated", when(held_out["time"])),
    ]


def _task(score: Mapping[str, Any]) -> Row:
    error = "" if score["stderr"] is None else number(score["stderr"])
    limit = "" if score["limit"] is None else f" (first {score['limit']:,})"
    return f"{score['task']}{limit}", score["metric"], number(score["value"]), error
