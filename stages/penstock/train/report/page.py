"""The page: a run's record and its charts, put into the template. Every value is escaped there."""

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from penstock.core.files import publishing
from penstock.train.report.chart import SIDE, Chart, chart, shown_indices
from penstock.train.report.data import data_section
from penstock.train.report.record import (
    RunRecord,
    all_settings,
    amount,
    key_figures,
    number,
    read_run,
    written_settings,
)

REPORT = "report.html"
POINTED_AT = ("step", "loss", "lr", "grad_norm", "tokens_per_second")
"""What the page tells of the step under the pointer."""


def write_report(output_dir: Path) -> Path:
    """Publish `report.html` in a training run's output folder, and return its path.

    Reads metrics.jsonl, job.json and, where they are, data.json, the outcome and the manifest. The
    page needs no network and, but for what it tells under the pointer, no scripts. Raises
    ConfigError if the folder holds no run, OSError if it cannot be read or written.
    """
    target = output_dir / REPORT
    text = render(read_run(output_dir))
    with publishing(target) as part:
        part.write_text(text, encoding="utf-8")
    return target


def render(run: RunRecord) -> str:
    """The whole page."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    large, small = _charts(run)
    return templates.get_template("page.html.jinja").render(
        run=run,
        figures=key_figures(run),
        large=large,
        small=small,
        side=SIDE,
        pointed_at=_pointed_at(run, [*large, *small]),
        data=data_section(run.data, run.config),
        changed=written_settings(run.config),
        settings=all_settings(run.config),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _charts(run: RunRecord) -> tuple[list[Chart], list[Chart]]:
    if not run.steps:
        return [], []
    steps = [record["step"] for record in run.steps]
    shown = shown_indices(len(steps))

    def values(name: str) -> list[float]:
        return [float(record[name]) for record in run.steps]

    loss = chart(
        "loss",
        "Loss",
        steps,
        values("loss"),
        shown,
        number,
        line="raw and smooth",
        points=run.evaluations,
    )
    small = [
        chart("lr", "Learning rate", steps, values("lr"), shown, number),
        chart("grad_norm", "Gradient norm", steps, values("grad_norm"), shown, number),
        chart(
            "tokens_per_second",
            "Tokens per second",
            steps,
            values("tokens_per_second"),
            shown,
            amount,
        ),
    ]
    return [loss], small


def _pointed_at(run: RunRecord, charts: list[Chart]) -> dict[str, Any]:
    """What the page's script reads: values at the shown steps, and their places in each chart."""
    records = [run.steps[index] for index in shown_indices(len(run.steps))] if run.steps else []
    columns = {name: [_or_none(record[name]) for record in records] for name in POINTED_AT}
    return {"values": columns, "places": {each.name: each.places for each in charts}}


def _or_none(value: float) -> float | None:
    """JSON, as browsers read it, has neither NaN nor infinities."""
    return value if math.isfinite(value) else None
