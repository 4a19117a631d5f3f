"""A run's folder as the leading rank leaves it, for those who follow what it tells."""

from pathlib import Path
from typing import Any

from penstock.config.loading.load import loads
from penstock.train.launch.job import METRICS, Job
from penstock.train.metrics.jsonl import MetricsLog


def record(step: int, loss: float, **more: Any) -> dict[str, Any]:
    """What a step tells."""
    return {
        "step": step,
        "epoch": step / 100,
        "loss": loss,
        "lr": 1e-3 / step,
        "grad_norm": 2.0 + step % 3,
        "tokens": 1000 + step,
        "trained_tokens": 500,
        "tokens_per_second": 20_000.0 - step,
        "seconds": 0.05,
        "time": 1_700_000_000.0 + step,
        **more,
    }


def falling(count: int, **more: Any) -> list[dict[str, Any]]:
    """The records of a run that learns."""
    return [record(step, 1 + 4 / step, **more) for step in range(1, count + 1)]


def job_in(folder: Path, **sections: dict[str, Any]) -> Job:
    """The job of a run in this folder, written."""
    settings: dict[str, dict[str, Any]] = {
        "model": {"config_path": "builtin:tiny-qwen3"},
        "data": {"datasets": [{"path": "builtin:arithmetic", "type": "chat"}]},
        "train": {},
    }
    for name, values in sections.items():
        settings[name] = {**settings.get(name, {}), **values}
    settings["train"]["output_dir"] = str(folder)
    folder.mkdir(parents=True, exist_ok=True)
    job = Job(
        key="0123456789abcdef" * 4,
        config=loads(settings),
        packed_dir=folder,
        packed_key="1" * 64,
        epoch_rows=(),
        max_token_id=258,
        config_path="builtin:tiny-qwen3",
        weights=None,
        output_dir=folder,
        launch_id="1",
    )
    job.write()
    return job


def tell(folder: Path, records: list[dict[str, Any]], resumed_step: int = 0) -> None:
    """Append records to the run's metrics, from a step on."""
    log = MetricsLog(folder / METRICS, resumed_step)
    for each in records:
        log.append(each)
    log.close()
