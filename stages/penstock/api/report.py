"""The outcome of a run: the report of its training, its metrics, and its model folder."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.api.tables import html_table
from penstock.core.cache.store import StageResult
from penstock.train.launch.job import METRICS, REPORT
from penstock.train.metrics.jsonl import read_metrics


@dataclass(frozen=True)
class Report:
    """The report of a run's training so far.

    In a notebook it is displayed as a table of its figures and a link to `report.html`.
    """

    folder: Path | None
    """`train.output_dir`, or this machine's mirror of it; None before this training has started."""
    figures: Mapping[str, Any]
    """By name: `first_loss`, `final_loss`, `steps`, `tokens`, `eval_loss` and the other facts of a
    finished training, and `model`, the folder of the exported model. Empty before training has
    ended."""

    @property
    def path(self) -> Path | None:
        """`report.html`; None if it does not exist yet."""
        page = self.folder / REPORT if self.folder else None
        return page if page and page.is_file() else None

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of `metrics.jsonl`, one per logged step or evaluation, in order."""
        return list(read_metrics(self.folder / METRICS)) if self.folder else []

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={value}" for name, value in self._numbers())
        return f"Report({self.path}{', ' if numbers else ''}{numbers})"

    def _repr_html_(self) -> str:
        page = self.path
        link = f'<a href="{page.absolute().as_uri()}">{REPORT}</a>' if page else "no report"
        return html_table([("figure", "value"), *self._numbers()]) + link

    def _numbers(self) -> list[tuple[str, str]]:
        return [
            (name, f"{value:.6g}" if isinstance(value, float) else str(value))
            for name, value in self.figures.items()
            if isinstance(value, int | float)
        ]


def run_result(done: Mapping[str, StageResult]) -> dict[str, Any]:
    """The paths of the model and the report, or None; the first loss, and the facts of training."""
    train, export = done.get("train"), done.get("export")
    model = exported_model(export) if export else None
    report = train.path / REPORT if train else None
    return {
        "model": str(model) if model else None,
        "report": str(report) if report and report.is_file() else None,
        "first_loss": first_loss(train.path / METRICS) if train else None,
        **(dict(train.facts) if train else {}),
    }


def exported_model(export: StageResult) -> Path | None:
    """The folder of the exported model or adapter; None if nothing was written."""
    folders = export.facts.get("folders", {})
    model = folders.get("hf", folders.get("adapter"))
    return export.path / model if model else None


def first_loss(metrics: Path) -> float | None:
    """The loss of the first logged step that has one; None if there is no readable record."""
    with suppress(OSError, ValueError), metrics.open(encoding="utf-8") as lines:
        losses = (row.get("loss") for row in map(json.loads, lines))
        return next((loss for loss in losses if loss is not None), None)
    return None
