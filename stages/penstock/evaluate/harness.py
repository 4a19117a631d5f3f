"""Run lm-evaluation-harness tasks on an exported model, with the package lm_eval."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.core.errors import CapabilityError, ConfigError
from penstock.engine.device import accelerator
from penstock.evaluate.folder import read_base_model

STDERR = "_stderr"


@dataclass(frozen=True)
class Score:
    """One metric of a task."""

    task: str
    metric: str  # The harness's name with the filter: `acc,none`
    value: float
    stderr: float | None  # Standard error, if the harness reports it


def run_tasks(
    hf_folder: Path,
    tasks: Sequence[str],
    *,
    limit: int | None,
    batch_size: int,
    seed: int,
    more_tasks: Path | None = None,
) -> list[Score]:
    """Evaluate the model in `hf_folder` on each task, on at most `limit` documents (None: all).

    `more_tasks` is a folder of custom tasks in the harness's format (include_path). Raises
    CapabilityError if lm_eval, or a package needed to load the folder, is not installed, and
    ConfigError for an unknown task.
    """
    if find_spec("lm_eval") is None:
        raise CapabilityError(
            "--harness runs tasks with the package lm_eval, which is not installed.\n"
            "  pip install 'penstock[harness]'."
        )
    # An optional package that takes seconds to import.
    lm_eval: Any = import_module("lm_eval")
    kinds: Any = import_module("lm_eval.tasks")
    manager = kinds.TaskManager(include_path=str(more_tasks) if more_tasks else None)
    task_names = set(manager.all_tasks)
    if unknown := [task for task in tasks if task not in task_names]:
        raise ConfigError(
            f"lm_eval {lm_eval.__version__} has no task {', '.join(unknown)}.\n"
            "  `lm_eval ls tasks` lists them; --harness-tasks names a folder with more."
        )
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args=model_arguments(hf_folder),
        tasks=list(tasks),
        limit=limit,
        batch_size=batch_size,
        device=str(accelerator()),
        task_manager=manager,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
        log_samples=False,
    )
    return parse_scores(results["results"])


def model_arguments(hf_folder: Path) -> dict[str, Any]:
    """The harness's `model_args` for a folder with a full model, or with an adapter."""
    base = read_base_model(hf_folder)
    if base is None:
        return {"pretrained": str(hf_folder), "dtype": "auto"}
    folder = str(hf_folder)
    return {"pretrained": base, "peft": folder, "tokenizer": folder, "dtype": "auto"}


def parse_scores(results: Mapping[str, Mapping[str, Any]]) -> list[Score]:
    """Extract the numeric metrics from the harness's results."""
    scores: list[Score] = []
    for task, metrics in results.items():
        for name, value in metrics.items():
            metric, _, of = name.partition(",")
            if not of or metric.endswith(STDERR) or not isinstance(value, int | float):
                continue
            error = metrics.get(f"{metric}{STDERR},{of}")
            stderr = float(error) if isinstance(error, int | float) else None
            scores.append(Score(task, name, float(value), stderr))
    return scores
