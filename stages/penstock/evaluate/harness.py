"""Tasks of the lm-evaluation-harness, run by its own package on a folder that others load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from penstock.core.errors import CapabilityError, ConfigError
from penstock.evaluate.folder import read_base_model

STDERR = "_stderr"


@dataclass(frozen=True)
class Score:
    """One number that a task tells."""

    task: str
    metric: str
    """As the harness calls it, with the filter of answers that it comes from: `acc,none`."""
    value: float
    stderr: float | None
    """Its standard error, where the harness knows one."""


def run_tasks(
    hf_folder: Path,
    tasks: Sequence[str],
    *,
    limit: int | None,
    batch_size: int,
    seed: int,
    more_tasks: Path | None = None,
) -> list[Score]:
    """What the model in `hf_folder` scores in each task, on `limit` of its documents or all.

    `more_tasks` is a folder of tasks of one's own, in the harness's format. Raises CapabilityError
    where the package, or one that loads the folder, is not installed, and ConfigError for a task
    that it does not know.
    """
    if find_spec("lm_eval") is None:
        raise CapabilityError(
            "--harness runs tasks with the package lm_eval, which is not installed.\n"
            "  pip install 'penstock[harness]'."
        )
    # Optional, and seconds to import.
    lm_eval: Any = import_module("lm_eval")
    kinds: Any = import_module("lm_eval.tasks")
    manager = kinds.TaskManager(include_path=str(more_tasks) if more_tasks else None)
    known = set(manager.all_tasks)
    if unknown := [task for task in tasks if task not in known]:
        raise ConfigError(
            f"lm_eval {lm_eval.__version__} has no task {', '.join(unknown)}.\n"
            "  `lm_eval ls tasks` lists them; --harness-tasks names a folder with more."
        )
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args=model_arguments(hf_folder),
        tasks=list(tasks),
        limit=limit,
        batch_size=batch_size,
        device="cuda" if torch.cuda.is_available() else "cpu",
        task_manager=manager,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
        log_samples=False,
    )
    return parse_scores(found["results"])


def model_arguments(hf_folder: Path) -> dict[str, Any]:
    """What the harness loads for a folder with a model, or with an adapter beside its base."""
    base = read_base_model(hf_folder)
    if base is None:
        return {"pretrained": str(hf_folder), "dtype": "auto"}
    return {
        "pretrained": base,
        "peft": str(hf_folder),
        "tokenizer": str(hf_folder),
        "dtype": "auto",
    }


def parse_scores(results: Mapping[str, Mapping[str, Any]]) -> list[Score]:
    """The numbers among what the harness tells of each task."""
    found: list[Score] = []
    for task, told in results.items():
        for name, value in told.items():
            metric, _, of = name.partition(",")
            if not of or metric.endswith(STDERR) or not isinstance(value, int | float):
                continue
            error = told.get(f"{metric}{STDERR},{of}")
            known = float(error) if isinstance(error, int | float) else None
            found.append(Score(task, name, float(value), known))
    return found
