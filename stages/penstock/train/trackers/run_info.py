"""Run metadata for trackers, known before the first step."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.schema.run import RunConfig
from penstock.core import env
from penstock.core.remote.urls import redact_text
from penstock.train.launch.job import Job

TRACKERS_FOLDER = "trackers"
"""Folder in `output_dir` for the trackers' resume state."""

TENSORBOARD = "tensorboard"
"""Folder in `output_dir` for TensorBoard event files."""

NOT_SHOWN = "(not shown)"


@dataclass(frozen=True)
class RunInfo:
    """A run as seen by trackers."""

    folder: Path
    """The local `output_dir`."""
    key: str
    project: str
    name: str
    tags: tuple[str, ...]
    settings: Mapping[str, Any]
    """The resolved config without secrets: dotted name to value."""
    mlflow_uri: str | None
    tensorboard_dir: Path
    """Folder of TensorBoard event files."""
    log_intervals: Mapping[str, int]
    """Logging interval in steps, by tracker."""

    @classmethod
    def from_job(cls, job: Job) -> "RunInfo":
        run, train = job.config, job.config.train
        return cls(
            folder=job.output_dir,
            key=job.key,
            project=train.wandb_project,
            name=train.wandb_name or run.pipeline.name,
            tags=tuple(train.wandb_tags or ()),
            settings=dict(redacted_settings(run)),
            mlflow_uri=train.mlflow_tracking_uri,
            tensorboard_dir=Path(train.log_dir) if train.log_dir else job.output_dir / TENSORBOARD,
            log_intervals={
                "wandb": train.wandb_log_interval,
                **dict.fromkeys(
                    ("tensorboard", "mlflow", "trackio", *train.trackers), train.log_interval
                ),
            },
        )


def resolve_mlflow_uri(run_info: RunInfo) -> str:
    """The MLflow tracking URI: as configured, else from the user's environment, else in the run
    folder."""
    file = (run_info.folder / "mlflow.db").resolve()
    return run_info.mlflow_uri or env.mlflow_uri() or f"sqlite:///{file}"


def redacted_settings(run: RunConfig, *, only_changed: bool = False) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every setting, or of those that differ from their defaults, with
    secrets in URLs and variables removed."""
    yield from _flatten(run.model_dump(mode="json", exclude_defaults=only_changed), "")


def _flatten(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for index, inner in enumerate(value):
            yield from _flatten(inner, f"{prefix}[{index}]")
    elif prefix.startswith("launch.env."):
        # Environment variables may contain secrets.
        yield prefix, NOT_SHOWN
    else:
        yield prefix, _redact(value)


def _redact(value: Any) -> Any:
    if isinstance(value, list):
        return [_redact(inner) for inner in value]
    return redact_text(value) if isinstance(value, str) else value
