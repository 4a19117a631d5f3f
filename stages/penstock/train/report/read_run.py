"""Read a training run's files for its report. No rendering here."""

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal

from penstock.config.schema.run import RunConfig
from penstock.core.cache import provenance
from penstock.core.cache.data_facts import read_data_facts, read_lineage
from penstock.core.cache.manifest import read_manifest
from penstock.core.cache.record import Record
from penstock.core.errors import ConfigError
from penstock.core.files import read_json
from penstock.core.remote.urls import redact_text
from penstock.train.data_samples import kept_shown_data
from penstock.train.eval.eval_results import read_eval_results
from penstock.train.launch.job import (
    ENVIRONMENT,
    JOB,
    LOGS,
    METRICS,
    SAMPLES,
    read_job,
    read_outcome,
)
from penstock.train.launch.rank_failures import first_failure
from penstock.train.metrics.jsonl import read_metrics
from penstock.train.report.format import (
    amount,
    duration,
    gibibytes,
    layout_text,
    number,
    plain,
    share,
)
from penstock.train.trackers.run_info import redacted_settings
from penstock.version import __version__

State = Literal["finished", "running", "stopped", "failed", "not finished"]

PHASES = {
    "data": "reading rows",
    "bubble": "waiting for other stages",
    "optimizer": "update",
    "between": "between steps",
}
"""Display names of phases."""

Figures = list[tuple[str, str]]

MAX_WARNINGS = 200
"""Maximum warnings of either kind; the newest are kept."""
RECOVERY_STEPS = 20
"""Steps after a spike whose median determines whether the loss recovered."""
MIN_RECOVERY_STEPS = 5
"""Minimum number of them."""
MAX_REMAINING = 0.5
"""The loss has recovered if at most this fraction of the increase remains."""

Rows = list[tuple[str, str]]
"""(place, text)."""


@dataclass(frozen=True)
class Warnings:
    """All warnings of a run."""

    active: Rows
    """Size warnings first, then the rest, newest first."""
    recovered: Rows
    """Spikes that recovered, highest first."""


@dataclass(frozen=True)
class RunRecord:
    """One training run, finished or not."""

    folder: Path
    key: str
    config: RunConfig
    steps: list[dict[str, Any]]
    """The step records of metrics.jsonl, in order."""
    evaluations: list[dict[str, Any]]
    """The evaluation records."""
    warnings: Warnings
    samples: list[dict[str, Any]]
    """The sample prompt records."""
    state: State
    status: str
    """The status as a sentence."""
    versions: Mapping[str, str]
    """Package versions."""
    environment: Mapping[str, Any]
    """Environment info, as far as known."""
    data: Mapping[str, Any] | None
    """Facts of the preceding stages, if stored."""
    data_samples: Mapping[str, Any]
    """Data samples and length histogram, as far as stored."""
    eval_results: Mapping[str, Any]
    """Results of `penstock eval`, if any."""
    build_info: Mapping[str, Any]
    """Build times of the stages, as far as known."""
    seconds: float | None
    """Duration of the stage in seconds, once complete."""
    epochs: float | None = None
    """Epochs trained, without skipped rows, once complete."""

    @property
    def title(self) -> str:
        return self.config.pipeline.name

    @property
    def subject(self) -> str:
        """Model and data, as named in the config."""
        model = self.config.model
        start = model.model_path or f"{model.config_path} from random weights"
        data = ", ".join(dataset.path for dataset in self.config.data.read_datasets)
        lora = self.config.lora
        kind = f"{'DoRA' if lora.use_dora else 'LoRA'} rank {lora.lora_rank}"
        method = kind if lora.enable_lora else "all weights"
        return redact_text(f"{start} on {data}, {method}")

    @property
    def holds_out(self) -> bool:
        """Whether some samples are evaluated instead of trained."""
        data = self.config.data
        return bool(data.val_set_size or data.test_datasets or self.evaluations)

    @property
    def progress(self) -> float | None:
        """Fraction of steps completed, if the total is known."""
        total = self.environment.get("total_steps")
        return min(1.0, self.steps[-1]["step"] / total) if total and self.steps else None

    @property
    def css_class(self) -> str:
        """The CSS class of the status line: a finished run with too few steps is marked."""
        names = {finding["name"] for finding in self.environment.get("findings", [])}
        doubtful = self.state == "finished" and "few_steps" in names
        return "stopped" if doubtful else self.state.replace(" ", "-")

    @cached_property
    def settings(self) -> dict[str, str]:
        """Every setting by dotted name, in YAML notation."""
        return {name: plain(v) for name, v in redacted_settings(self.config)}

    @cached_property
    def non_default_settings(self) -> set[str]:
        return {name for name, _ in redacted_settings(self.config, only_changed=True)}


def read_run(output_dir: Path, *, state: Literal["running"] | None = None) -> RunRecord:
    """Read the run in `output_dir`, which is `running` if the caller knows that; otherwise its
    state is read from the files.

    Raises ConfigError if there is none, OSError if unreadable.
    """
    if not (output_dir / JOB).is_file():
        raise ConfigError(
            f"{output_dir} contains no training run: it has no {JOB}.\n  Name a train.output_dir."
        )
    job = read_job(output_dir / JOB)
    records = list(read_metrics(output_dir / METRICS))
    steps = [record for record in records if "loss" in record]
    outcome = read_outcome(output_dir)
    run_state, status = (state, "running") if state else _status(output_dir, outcome)
    environment_file = output_dir / ENVIRONMENT
    surroundings = read_json(environment_file) if environment_file.is_file() else {}
    manifest = read_manifest(output_dir)
    if manifest:
        versions = manifest["code"]
    elif environment_file.is_file():
        versions = surroundings["versions"]
    else:
        python = platform.python_version()
        versions = {"penstock": __version__, "python": python, **provenance.versions()}
    return RunRecord(
        folder=output_dir,
        key=job["key"],
        config=RunConfig.model_validate(job["config"]),
        steps=steps,
        evaluations=[r for r in records if "eval_loss" in r],
        warnings=collect_warnings(records, steps, surroundings.get("findings", [])),
        samples=list(read_metrics(output_dir / SAMPLES)),
        state=run_state,
        status=status,
        versions=versions,
        environment=surroundings,
        data=read_data_facts(output_dir),
        data_samples=kept_shown_data(output_dir),
        eval_results=read_eval_results(output_dir, job["key"]),
        build_info=read_lineage(output_dir),
        seconds=manifest["seconds"] if manifest else None,
        epochs=outcome["facts"].get("epochs") if outcome and outcome["facts"] else None,
    )


def key_figures(run: RunRecord) -> Figures:
    """Key metrics as (name, value); empty before the first step.

    Losses are the run's own: of the last step, and of the last evaluation.
    """
    if not run.steps:
        return _held_out_figures(run)
    last, total = run.steps[-1], run.environment.get("total_steps")
    # A step without a trained token has no loss.
    losses = (record["loss"] for record in reversed(run.steps))
    of_total = f" of {total:,}" if total and total > last["step"] else ""
    figures = [
        ("loss", number(next((loss for loss in losses if loss is not None), None))),
        *_held_out_figures(run),
        ("steps", f"{last['step']:,}{of_total}"),
        ("epochs", f"{last['epoch'] if run.epochs is None else run.epochs:.2f}"),
        ("tokens", amount(sum(r["tokens"] for r in run.steps))),
        ("trained tokens", amount(sum(r["trained_tokens"] for r in run.steps))),
        ("tokens per second, median", amount(median(r["tokens_per_second"] for r in run.steps))),
    ]
    mfu = [r["mfu"] for r in run.steps if r.get("mfu") is not None]
    if mfu:
        figures.append(("MFU, median", share(median(mfu))))
    used = [r for r in run.steps if "memory_gib" in r]
    if used:
        most = max(used, key=lambda r: r["memory_gib"])
        on_rank = f" on rank {most['memory_rank']}" if "memory_rank" in most else ""
        figures.append(("peak memory", gibibytes(most["memory_gib"]) + on_rank))
    figures.append(("training time", duration(sum(r["seconds"] for r in run.steps))))
    if run.state == "running" and total:
        recent = run.steps[-50:]
        seconds_per_step = sum(r["seconds"] for r in recent) / len(recent)
        figures.append(("ETA", duration((total - last["step"]) * seconds_per_step)))
    return figures


def time_by_phase(run: RunRecord) -> list[tuple[str, float, str]]:
    """(phase, fraction of the time, time) over the whole run, longest first.

    Communication happens within other phases and is omitted.
    """
    totals: dict[str, float] = {}
    for record in run.steps:
        for phase, seconds in record.get("phases", {}).items():
            if phase != "communication":
                totals[phase] = totals.get(phase, 0.0) + seconds
    total = sum(totals.values())
    if not total:
        return []
    ordered = sorted(totals.items(), key=lambda item: -item[1])
    return [
        (PHASES.get(phase, phase.replace("_", " ")), seconds / total, duration(seconds))
        for phase, seconds in ordered
    ]


def environment(run: RunRecord) -> Figures:
    """The hardware and software of the run."""
    facts, figures = run.environment, Figures()
    if facts:
        figures += [
            ("device", f"{facts['device']}, {facts['ranks']} rank(s)"),
            ("layout", layout_text(facts["layout"])),
            ("host", facts["host"]),
            ("system", facts["system"]),
        ]
        if facts["quantised"]:
            figures.append(("quantized to", ", ".join(facts["quantised"])))
    return [*figures, *run.versions.items()]


def _held_out_figures(run: RunRecord) -> Figures:
    figures = Figures()
    if run.evaluations:
        evaluation = run.evaluations[-1]
        figures.append(("evaluation loss", number(evaluation["eval_loss"])))
        if "eval_token_accuracy" in evaluation:
            figures.append(("evaluation token accuracy", share(evaluation["eval_token_accuracy"])))
    if held_out := run.eval_results["held_out"]:
        figures.append(("exact match", share(held_out["accuracy"])))
    return figures


def _status(output_dir: Path, outcome: Record | None) -> tuple[State, str]:
    if outcome:
        if outcome["facts"] is None:
            return (
                "stopped",
                f"stopped after step {outcome['step']:,}; the same command resumes from there",
            )
        steps = outcome["step"]
        return "finished", f"finished after {steps:,} step{'' if steps == 1 else 's'}"
    if failure := first_failure(output_dir / LOGS):
        return "failed", f"failed: {redact_text(failure)}"
    return "not finished", "not finished"


def collect_warnings(
    records: Iterable[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
    findings: Sequence[Mapping[str, str]],
) -> Warnings:
    """The warnings in `records`, and `findings`, most severe first."""
    active: Rows = []
    recovered: list[tuple[float, tuple[str, str]]] = []
    for record in records:
        if "warning" not in record:
            continue
        row = (f"step {record['step']:,}", redact_text(record["warning"]))
        spike = record.get("spike")
        if spike and _has_recovered(spike, record["step"], steps):
            recovered.append((spike["loss"], row))
        else:
            active.append(row)
    recovered.sort(key=lambda item: -item[0])
    return Warnings(
        active=[*(("run", item["text"]) for item in findings), *reversed(active[-MAX_WARNINGS:])],
        recovered=[row for _, row in recovered[:MAX_WARNINGS]],
    )


def _has_recovered(
    spike: Mapping[str, float], step: int, steps: Sequence[Mapping[str, Any]]
) -> bool:
    following = (record for record in steps if step < record["step"] <= step + RECOVERY_STEPS)
    later = [record["loss"] for record in following if record["loss"] is not None]
    if len(later) < MIN_RECOVERY_STEPS:
        return False
    return median(later) - spike["usual"] <= MAX_REMAINING * (spike["loss"] - spike["usual"])
