"""The charts of a report, for one run or a comparison of several."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from penstock.train.metrics.jsonl import is_number
from penstock.train.report.chart import Chart, Kind, Series, Unit, chart, shown_indices
from penstock.train.report.format import amount, gibibytes, number, share
from penstock.train.report.heatmap import HeatMap, by_expert, over_steps
from penstock.train.report.read_run import RunRecord


@dataclass(frozen=True)
class Curve:
    """A column of the records, with the title and label of its chart."""

    column: str
    title: str
    label: Callable[[float], str] = number
    unit: Unit = "number"
    of: Literal["steps", "evaluations"] = "steps"


LOSS = Curve("loss", "Loss")
HELD_OUT = Curve("eval_loss", "held-out rows", of="evaluations")

SPEED = (
    Curve("tokens_per_second", "Tokens per second", amount, "amount"),
    Curve("mfu", "Share of the device's peak (MFU)", share, "share"),
    Curve("memory_gib", "Memory, peak", gibibytes, "GiB"),
)
UNRATED = Curve("tflops", "TFLOP/s per device")
"""Shown instead of MFU if the peak FLOP/s are unknown."""
OPTIMISATION = (
    Curve("lr", "Learning rate"),
    Curve("grad_norm", "Gradient norm"),
    Curve("param_norm", "Parameter norm"),
    Curve("aux_loss", "Load-balancing loss"),
    Curve("z_loss", "z-loss"),
    Curve("loss_scale", "Loss scale"),
)
ANSWERS = (
    Curve("rewards/margins", "Reward margin"),
    Curve("rewards/accuracies", "Pairs the right way round", share, "share"),
    Curve("rewards/chosen", "Reward of chosen answers"),
    Curve("rewards/rejected", "Reward of rejected answers"),
    Curve("logps/chosen", "Log-probability of chosen answers"),
    Curve("logps/rejected", "Log-probability of rejected answers"),
)
"""Curves of preference training."""
HELD = (
    Curve("eval_perplexity", "Held-out perplexity", of="evaluations"),
    Curve("eval_token_accuracy", "Held-out token accuracy", share, "share", of="evaluations"),
    *(replace(one, column=f"eval_{one.column}", of="evaluations") for one in ANSWERS),
)

MOST_DOTS = 40
"""Maximum evaluations drawn as points; above it, only the line."""

SOURCE = "eval_loss/"
"""Prefix of the per-data-set loss columns."""


def loss_chart(runs: Sequence[RunRecord]) -> Chart | None:
    """The main chart: training and evaluation loss of each run."""
    series: list[Series] = []
    for index, run in enumerate(runs):
        whose = f"{letter(index)} " if len(runs) > 1 else ""
        kinds: list[tuple[Curve, Kind]] = [(LOSS, "raw and smooth"), (HELD_OUT, "dots")]
        for curve, kind in kinds:
            word = f"{whose}{'loss' if curve is LOSS else curve.title}"
            # A single run's evaluation loss has its own color; with several runs it has the run's
            # color.
            colour = index if len(runs) > 1 or curve is LOSS else 1
            series += _series(run, index, curve, word, colour, kind)
    if not series:
        return None
    is_smoothed = any(each.kind == "raw and smooth" and len(each.steps) > 1 for each in series)
    note = "Faint: each step. Bold: a mean over about a hundredth of the run to either side."
    return chart("loss", "Loss", series, number, note=note if is_smoothed else "")


def groups(runs: Sequence[RunRecord]) -> list[tuple[str, list[Chart]]]:
    """(heading, charts) of the small charts; metrics that no run has are omitted."""
    is_rated = any(is_number(run.steps[-1].get("mfu")) for run in runs if run.steps)
    speed = SPEED if is_rated else (SPEED[0], UNRATED, *SPEED[1:])
    found = [
        ("Optimization", list(_charts(runs, OPTIMISATION))),
        ("Answers", list(_charts(runs, ANSWERS))),
        ("Held-out rows", [*_charts(runs, HELD), *_by_source(runs)]),
        ("Speed and memory", list(_charts(runs, speed))),
    ]
    return [(heading, charts) for heading, charts in found if charts]


def heat_maps(run: RunRecord) -> list[HeatMap]:
    """Heat maps of layers and experts."""
    found: list[HeatMap] = []
    for column, title in (
        ("grad_norms", "Gradient norm by layer"),
        ("param_norms", "Parameter norm by layer"),
    ):
        told = [record for record in run.steps if record.get(column)]
        if told:
            rows = list(told[-1][column])
            values = [[record[column].get(row, float("nan")) for row in rows] for record in told]
            steps = [record["step"] for record in told]
            found.append(over_steps(column, title, rows, steps, values, bend="log"))
    told = [record for record in run.steps if "routers" in record]
    if told:
        layers = [f"layer {layer}" for layer in told[-1]["routers"]["layers"]]
        steps = [record["step"] for record in told]
        found.append(
            over_steps(
                "imbalance",
                "How unevenly experts were used",
                layers,
                steps,
                [record["routers"]["imbalance"] for record in told],
                note="The busiest expert's tokens over the mean; 1 is even.",
                palest=1.0,
            )
        )
        found += _loads(told, layers)
    return found


def columns(run: RunRecord, most: int) -> dict[str, dict[str, list[float | None]]]:
    """The numbers embedded in the page: by kind of record, each column at the shown steps."""
    kinds = {"steps": run.steps, "evaluations": run.evaluations}
    found: dict[str, dict[str, list[float | None]]] = {}
    for kind, records in kinds.items():
        shown = [records[at] for at in shown_indices(len(records), most)] if records else []
        names = sorted({name for record in shown for name, v in record.items() if is_number(v)})
        found[kind] = {name: [_finite(record.get(name)) for record in shown] for name in names}
    return found


def axes(run: RunRecord, most: int) -> dict[str, list[float]]:
    """Progress at the shown steps: `step`, and cumulative `tokens`, `epoch` and `seconds`. All are
    increasing, so that any of them can be mapped to a step."""
    first = run.steps[0]["step"] - 1 if run.steps else 0
    tokens = list(accumulate((r["tokens"] for r in run.steps), initial=0))
    seconds = list(accumulate((r["seconds"] for r in run.steps), initial=0.0))
    shown = [0, *(at + 1 for at in shown_indices(len(run.steps), most))] if run.steps else [0]
    return {
        "step": [first, *(run.steps[at - 1]["step"] for at in shown[1:])],
        "tokens": [tokens[at] for at in shown],
        "epoch": [0, *(run.steps[at - 1]["epoch"] for at in shown[1:])],
        "seconds": [round(seconds[at], 3) for at in shown],
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
            yield chart(curve.column, curve.title, series, curve.label, unit=curve.unit)


def _by_source(runs: Sequence[RunRecord]) -> Iterator[Chart]:
    names = sorted({n for run in runs for r in run.evaluations for n in r if n.startswith(SOURCE)})
    if len(runs) == 1 and names:
        series = [
            one
            for colour, name in enumerate(names)
            for one in _series(
                runs[0], 0, Curve(name, "", of="evaluations"), name.removeprefix(SOURCE), colour
            )
        ]
        yield chart("eval_sources", "Held-out loss by source", series, number)
    elif names:
        yield from _charts(
            runs,
            [Curve(n, f"Held-out loss, {n.removeprefix(SOURCE)}", of="evaluations") for n in names],
        )


def _series(
    run: RunRecord, index: int, curve: Curve, label: str, colour: int, kind: Kind = "line"
) -> Iterator[Series]:
    records = run.steps if curve.of == "steps" else run.evaluations
    if curve.of == "evaluations" and len(records) <= MOST_DOTS:
        kind = "dots"
    told = [record for record in records if is_number(record.get(curve.column))]
    if told:
        yield Series(
            label=label,
            table=f"{index}.{curve.of}",
            column=curve.column,
            steps=[record["step"] for record in told],
            values=[float(record[curve.column]) for record in told],
            colour=colour,
            kind=kind,
        )


def _loads(told: Sequence[dict[str, Any]], layers: Sequence[str]) -> Iterator[HeatMap]:
    """Tokens per expert over the last tenth of the steps."""
    recent = [record["routers"] for record in told[-max(1, len(told) // 10) :]]
    recent = [each for each in recent if "counts" in each]
    if not recent:
        return
    sums = [
        [sum(counts) for counts in zip(*(each["counts"][at] for each in recent), strict=True)]
        for at in range(len(layers))
    ]
    loads = [[count * len(row) / max(1, sum(row)) for count in row] for row in sums]
    yield by_expert(
        "load",
        "Tokens of each expert",
        layers,
        loads,
        note=f"{_over_the_last(len(recent))}; 1 is an even share. {_idle(loads)}",
    )


def _over_the_last(steps: int) -> str:
    return "In the last step" if steps == 1 else f"Over the last {steps:,} steps"


def _idle(loads: Sequence[Sequence[float]]) -> str:
    """Experts that received no tokens."""
    idle = sum(load == 0 for row in loads for load in row)
    count = sum(map(len, loads))
    return f"{idle:,} of {count:,} experts got none." if idle else "Every expert got some."
