"""Report page: records and charts rendered into an HTML template with autoescaping."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from penstock.core.cache.data_facts import DATA, LINEAGE
from penstock.core.errors import ConfigError, DamagedFileError
from penstock.core.files import atomic_write
from penstock.train.launch.job import (
    DATA_SAMPLES,
    ENVIRONMENT,
    EVAL_RESULTS,
    METRICS,
    REPORT,
    SAMPLES,
)
from penstock.train.report.chart import VIEWBOX, Chart
from penstock.train.report.charts import (
    build_chart_groups,
    build_heat_maps,
    build_loss_chart,
    letter,
    tooltip_columns,
    x_axis_values,
)
from penstock.train.report.heatmap import HeatMap
from penstock.train.report.read_run import (
    RunRecord,
    environment,
    key_figures,
    read_run,
    time_by_phase,
)
from penstock.train.report.sections import (
    build_data_section,
    build_evaluation_section,
    build_lineage,
)
from penstock.version import __version__

MAX_RUNS = 6
"""Maximum runs of a comparison, one color each."""
MIN_REFRESH_SECONDS = 10
"""Minimum auto-refresh interval in seconds of a running run's report."""
MISSING = "-"


def write_report(output_dir: Path, *, state: Literal["running"] | None = None) -> Path:
    """Write `report.html` in a run's output folder; return its path.

    Reads metrics.jsonl, job.json and, if present, the run's data samples, environment info, sample
    prompts, evaluations, outcome and manifest. The page needs no network and, except for axis
    switching and tooltips, no scripts.

    Raises ConfigError if the folder has no run, OSError if it cannot be read or written,
    ArtifactError for a damaged file.
    """
    target = output_dir / REPORT
    with _explain_missing_fields(output_dir):
        text = render(read_run(output_dir, state=state))
    with atomic_write(target) as part:
        part.write_text(text, encoding="utf-8")
    return target


@contextmanager
def _explain_missing_fields(*folders: Path) -> Generator[None]:
    """Translate missing fields to an error that names the files read."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        names = ", ".join(map(str, folders))
        raise DamagedFileError(
            f"no report of {names}: {METRICS}, {SAMPLES}, {DATA}, {LINEAGE}, {DATA_SAMPLES}, "
            f"{EVAL_RESULTS} or {ENVIRONMENT} lacks a field that a run writes "
            f"({type(error).__name__}: {error}).\n"
            "  Restore the file from a copy; --debug shows the field that was read."
        ) from error


def write_comparison(folders: Sequence[Path], target: Path) -> Path:
    """Write one page that compares several training runs to `target`; return it.

    Raises ConfigError for a folder without a run, or for too many runs.
    """
    if len(folders) > MAX_RUNS:
        raise ConfigError(
            f"{len(folders)} runs are too many for one page; at most {MAX_RUNS} are compared.\n"
            "  Name fewer."
        )
    with _explain_missing_fields(*folders):
        text = render_comparison([read_run(folder) for folder in folders])
    with atomic_write(target) as part:
        part.write_text(text, encoding="utf-8")
    return target


def render(run: RunRecord) -> str:
    """Render the page of one run."""
    loss, small, maps = build_loss_chart([run]), build_chart_groups([run]), build_heat_maps(run)
    time, samples = time_by_phase(run), _completions(run)
    data = build_data_section(run.data, run.data_samples, run.config)
    evaluation = build_evaluation_section(run)
    interval = max(MIN_REFRESH_SECONDS, round(run.config.train.report_interval))
    return _render_template(
        "run.html.jinja",
        [run],
        [loss, *(chart for _, charts in small for chart in charts)],
        maps,
        refresh=interval if run.state == "running" else None,
        run=run,
        figures=key_figures(run),
        loss=loss,
        groups=small,
        time=time,
        maps=maps,
        evaluation=evaluation,
        samples=samples,
        data=data,
        lineage=build_lineage(run),
        changed=[row for row in run.settings.items() if row[0] in run.non_default_settings],
        settings=list(run.settings.items()),
        environment=environment(run),
        sections=[
            *([("loss", "Loss")] if loss else []),
            *((f"group-{number}", heading) for number, (heading, _) in enumerate(small, start=1)),
            *([("time", "Time")] if time else []),
            *([("layers", "Layers")] if maps else []),
            *([("evaluation", "Evaluation")] if evaluation else []),
            *([("samples", "Sample prompts")] if samples else []),
            *([("data", "Data")] if data else []),
            ("lineage", "Lineage"),
            ("settings", "Settings"),
            ("environment", "Environment"),
        ],
    )


def render_comparison(runs: Sequence[RunRecord]) -> str:
    """Render the page of several runs."""
    names = [f"{letter(index)} · {run.folder.resolve().name}" for index, run in enumerate(runs)]
    loss, small = build_loss_chart(runs), build_chart_groups(runs)
    return _render_template(
        "comparison.html.jinja",
        runs,
        [loss, *(chart for _, charts in small for chart in charts)],
        [],
        refresh=None,
        runs=runs,
        names=names,
        letters=[letter(index) for index in range(len(runs))],
        figures=_comparison_rows([dict(key_figures(run)) for run in runs]),
        loss=loss,
        groups=small,
        times=[
            (name, rows)
            for name, run in zip(names, runs, strict=True)
            if (rows := time_by_phase(run))
        ],
        differences=[
            row for row in _comparison_rows([run.settings for run in runs]) if len(set(row[1:])) > 1
        ],
        environments=_comparison_rows([dict(environment(run)) for run in runs]),
    )


def _render_template(
    template: str,
    records: Sequence[RunRecord],
    charts: Sequence[Chart | None],
    heat_maps: Sequence[HeatMap],
    **values: Any,
) -> str:
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        # Off by default in Jinja: prompts, answers and paths may hold markup.
        autoescape=True,
        # By default Jinja prints nothing for a name that is missing or misspelt.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    numbers = {
        "tables": [tooltip_columns(run) for run in records],
        "axes": [x_axis_values(run) for run in records],
        "charts": {chart.name: chart.tooltip for chart in charts if chart},
        "maps": {heat_map.name: heat_map.tooltip for heat_map in heat_maps},
    }
    return templates.get_template(template).render(
        numbers=numbers,
        side=VIEWBOX,
        version=__version__,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **values,
    )


def _completions(run: RunRecord) -> list[tuple[str, list[tuple[int, str]]]]:
    """(prompt, (step, completion) newest first), in prompt order."""
    completions: dict[str, list[tuple[int, str]]] = {}
    for record in run.samples:
        for sample in record["samples"]:
            completions.setdefault(sample["prompt"], []).insert(
                0, (record["step"], sample["answer"])
            )
    return list(completions.items())


def _comparison_rows(of_runs: Sequence[Mapping[str, str]]) -> list[tuple[str, ...]]:
    """One row per name that any run has, in order."""
    names = list(dict.fromkeys(name for values in of_runs for name in values))
    return [(name, *(values.get(name, MISSING) for values in of_runs)) for name in names]
