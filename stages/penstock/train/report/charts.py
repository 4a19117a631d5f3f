"""The charts of a report, for one run or a comparison of several."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from penstock.train.metrics.jsonl import is_number
from penstock.train.report.chart import Chart, Kind, Series, Unit, build_chart, sample_indices
from penstock.train.report.format import amount, gibibytes, number, share
from penstock.train.report.heatmap import HeatMap, layer_expert_map, layer_step_map
from penstock.train.report.read_run import RunRecord


@dataclass(frozen=True)
class Curve:
    """A column of the records, with the title and label of its chart."""

    column: str
    title: str
    label: Callable[[float], str] = number
    unit: Unit = "number"
    records: Literal["steps", "evaluations"] = "steps"


LOSS = Curve("loss", "Loss")
EVAL_LOSS = Curve("eval_loss", "evaluation loss", records="evaluations")

SPEED = (
    Curve("tokens_per_second", "Tokens per second", amount, "amount"),
    Curve("mfu", "MFU", share, "share"),
    Curve("memory_gib", "Peak memory", gibibytes, "GiB"),
)
TFLOPS = Curve("tflops", "TFLOP/s per device")
"""Shown instead of MFU if the peak FLOP/s are unknown."""
OPTIMIZATION = (
    Curve("lr", "Learning rate"),
    Curve("grad_norm", "Gradient norm"),
    Curve("param_norm", "Parameter norm"),
    Curve("mtp_loss", "Multi-token prediction loss"),
    Curve("indexer_loss", "Indexer loss"),
    Curve("aux_loss", "Load-balancing loss"),
    Curve("z_loss", "z-loss"),
    Curve("loss_scale", "Loss scale"),
    Curve("max_attention_logit", "Largest attention logit"),
)
PREFERENCE = (
    Curve("rewards/margins", "Reward margin"),
    Curve("rewards/accuracies", "Reward accuracy", share, "share"),
    Curve("rewards/chosen", "Reward of chosen completions"),
    Curve("rewards/rejected", "Reward of rejected completions"),
    Curve("logps/chosen", "Log-prob of chosen completions"),
    Curve("logps/rejected", "Log-prob of rejected completions"),
)
"""Curves of preference training."""
EVALUATION = (
    Curve("eval_perplexity", "Evaluation perplexity", records="evaluations"),
    Curve(
        "eval_token_accuracy", "Evaluation token accuracy", share, "share", records="evaluations"
    ),
    *(replace(chart, column=f"eval_{chart.column}", records="evaluations") for chart in PREFERENCE),
)

MAX_DOTS = 40
"""Maximum evaluations drawn as points; above it, only the line."""

SOURCE_PREFIX = "eval_loss/"
"""Prefix of the per-data-set loss columns."""


def build_loss_chart(runs: Sequence[RunRecord]) -> Chart | None:
    """The main chart: training and evaluation loss of each run."""
    series: list[Series] = []
    for index, run in enumerate(runs):
        prefix = f"{letter(index)} " if len(runs) > 1 else ""
        kinds: list[tuple[Curve, Kind]] = [(LOSS, "raw and smooth"), (EVAL_LOSS, "dots")]
        for curve, kind in kinds:
            legend = f"{prefix}{'loss' if curve is LOSS else curve.title}"
            # A single run's evaluation loss has its own color; with several runs it has the run's
            # color.
            colour = index if len(runs) > 1 or curve is LOSS else 1
            series += _series(run, index, curve, legend, colour, kind)
    if not series:
        return None
    is_smoothed = any(line.kind == "raw and smooth" and len(line.steps) > 1 for line in series)
    note = "Faint: each step. Bold: smoothed over about a hundredth of the run to either side."
    return build_chart("loss", "Loss", series, number, note=note if is_smoothed else "")


def build_chart_groups(runs: Sequence[RunRecord]) -> list[tuple[str, list[Chart]]]:
    """(heading, charts) of the small charts; metrics that no run has are omitted."""
    is_rated = any(is_number(run.steps[-1].get("mfu")) for run in runs if run.steps)
    speed = SPEED if is_rated else (SPEED[0], TFLOPS, *SPEED[1:])
    groups = [
        ("Optimization", list(_charts(runs, OPTIMIZATION))),
        ("Preference metrics", list(_charts(runs, PREFERENCE))),
        ("Evaluation", [*_charts(runs, EVALUATION), *_source_charts(runs)]),
        ("Speed and memory", list(_charts(runs, speed))),
    ]
    return [(heading, charts) for heading, charts in groups if charts]


def build_heat_maps(run: RunRecord) -> list[HeatMap]:
    """Heat maps of layers and experts."""
    maps: list[HeatMap] = []
    for column, title in (
        ("grad_norms", "Gradient norm by layer"),
        ("param_norms", "Parameter norm by layer"),
    ):
        present = [record for record in run.steps if record.get(column)]
        if present:
            rows = list(present[-1][column])
            values = [[record[column].get(row, float("nan")) for row in rows] for record in present]
            steps = [record["step"] for record in present]
            maps.append(layer_step_map(column, title, rows, steps, values, scale="log"))
    present = [record for record in run.steps if "routers" in record]
    if present:
        layers = [f"layer {layer}" for layer in present[-1]["routers"]["layers"]]
        steps = [record["step"] for record in present]
        maps.append(
            layer_step_map(
                "imbalance",
                "Expert load imbalance",
                layers,
                steps,
                [record["routers"]["imbalance"] for record in present],
                note="Tokens of the busiest expert divided by the mean; 1 is balanced.",
                palest=1.0,
            )
        )
        maps += _expert_load_maps(present, layers)
    return maps


def tooltip_columns(run: RunRecord) -> dict[str, dict[str, list[float | None]]]:
    """The numbers embedded in the page: by kind of record, each column at the shown steps."""
    kinds = {"steps": run.steps, "evaluations": run.evaluations}
    columns: dict[str, dict[str, list[float | None]]] = {}
    for kind, records in kinds.items():
        shown = [records[index] for index in sample_indices(len(records))]
        names = sorted({name for record in shown for name, v in record.items() if is_number(v)})
        columns[kind] = {name: [_finite(record.get(name)) for record in shown] for name in names}
    return columns


def x_axis_values(run: RunRecord) -> dict[str, list[float]]:
    """Progress at the shown steps: `step`, and cumulative `tokens`, `epoch` and `seconds`. All are
    increasing, so that any of them can be mapped to a step."""
    first = run.steps[0]["step"] - 1 if run.steps else 0
    tokens = list(accumulate((r["tokens"] for r in run.steps), initial=0))
    seconds = list(accumulate((r["seconds"] for r in run.steps), initial=0.0))
    shown = [0, *(index + 1 for index in sample_indices(len(run.steps)))]
    return {
        "step": [first, *(run.steps[index - 1]["step"] for index in shown[1:])],
        "tokens": [tokens[index] for index in shown],
        "epoch": [0, *(run.steps[index - 1]["epoch"] for index in shown[1:])],
        "seconds": [round(seconds[index], 3) for index in shown],
    }


def letter(index: int) -> str:
    """The letter of a run in a comparison."""
    return chr(ord("A") + index)


def _finite(value: Any) -> float | None:
    """JSON has no NaN or infinities."""
    return value if is_number(value) and math.isfinite(value) else None


def _charts(runs: Sequence[RunRecord], curves: Iterable[Curve]) -> Iterator[Chart]:
    for curve in curves:
        series: list[Series] = []
        for index, run in enumerate(runs):
            label = letter(index) if len(runs) > 1 else curve.title
            series += _series(run, index, curve, label, index)
        if series:
            yield build_chart(curve.column, curve.title, series, curve.label, unit=curve.unit)


def _source_charts(runs: Sequence[RunRecord]) -> Iterator[Chart]:
    columns = {n for run in runs for r in run.evaluations for n in r if n.startswith(SOURCE_PREFIX)}
    labels = {column: column.removeprefix(SOURCE_PREFIX) for column in sorted(columns)}
    curves = [
        Curve(column, f"Evaluation loss, {label}", records="evaluations")
        for column, label in labels.items()
    ]
    if len(runs) > 1:
        yield from _charts(runs, curves)
    elif curves:
        series: list[Series] = []
        for color, curve in enumerate(curves):
            series += _series(runs[0], 0, curve, labels[curve.column], color)
        yield build_chart("eval_sources", "Evaluation loss by source", series, number)


def _series(
    run: RunRecord, index: int, curve: Curve, label: str, colour: int, kind: Kind = "line"
) -> Iterator[Series]:
    records = run.steps if curve.records == "steps" else run.evaluations
    if curve.records == "evaluations" and len(records) <= MAX_DOTS:
        kind = "dots"
    present = [record for record in records if is_number(record.get(curve.column))]
    if present:
        yield Series(
            label=label,
            table=f"{index}.{curve.records}",
            column=curve.column,
            steps=[record["step"] for record in present],
            values=[float(record[curve.column]) for record in present],
            color=colour,
            kind=kind,
        )


def _expert_load_maps(
    present: Sequence[dict[str, Any]], layers: Sequence[str]
) -> Iterator[HeatMap]:
    """Tokens per expert over the last tenth of the steps."""
    recent = [record["routers"] for record in present[-max(1, len(present) // 10) :]]
    recent = [record for record in recent if "counts" in record]
    if not recent:
        return
    loads: list[list[float]] = []
    for layer in range(len(layers)):
        of_steps = (record["counts"][layer] for record in recent)
        tokens = [sum(counts) for counts in zip(*of_steps, strict=True)]
        loads.append([count * len(tokens) / max(1, sum(tokens)) for count in tokens])
    steps = "In the last step" if len(recent) == 1 else f"Over the last {len(recent):,} steps"
    idle, experts = sum(row.count(0) for row in loads), sum(map(len, loads))
    usage = f"{idle:,} of {experts:,} experts got no" if idle else "Every expert got"
    note = f"{steps}; 1 is balanced. {usage} tokens."
    yield layer_expert_map("load", "Tokens per expert", layers, loads, note=note)
