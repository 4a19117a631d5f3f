"""Results of `penstock eval`, stored in the run folder for the report.

They are not part of the run's result, because evaluations may be run later and repeatedly.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.core.files import read_json, write_json
from penstock.train.launch.job import EVAL_RESULTS
from penstock.train.masked_text import masked

MAX_COMPLETIONS = 12
"""Maximum number of stored completions; half of them wrong ones, if there are enough of both."""
MAX_CHARACTERS = 2_000
"""Maximum length of each stored text."""
TEXTS = ("prompt", "expected", "answer")


def write_held_out_results(folder: Path, key: str, results: Mapping[str, Any]) -> None:
    """Store held-out results for the run with this key in `folder`: `asked`, `right`, `accuracy`,
    `pattern` (of the compared part, or None) and `samples`, each with TEXTS and `right`."""
    samples = [
        {**sample, **{name: _truncate(masked(sample[name])) for name in TEXTS}}
        for sample in _select_samples(results["samples"])
    ]
    _update(folder, key, held_out={**results, "samples": samples, "time": _now()})


def write_task_scores(
    folder: Path, key: str, scores: Sequence[Mapping[str, Any]], limit: int | None
) -> None:
    """Store task scores (`task`, `metric`, `value`, `stderr`); they replace earlier scores of the
    same tasks."""
    rescored = {score["task"] for score in scores}
    other_scores = [
        score for score in read_eval_results(folder, key)["tasks"] if score["task"] not in rescored
    ]
    added = [{**score, "limit": limit, "time": _now()} for score in scores]
    _update(folder, key, tasks=[*other_scores, *added])


def read_eval_results(folder: Path, key: str) -> dict[str, Any]:
    """Read `held_out` (None if not evaluated) and `tasks`. Results of another run that used the
    same folder are ignored."""
    path = folder / EVAL_RESULTS
    nothing: dict[str, Any] = {"held_out": None, "tasks": []}
    stored = read_json(path) if path.is_file() else nothing
    return {**nothing, **stored} if stored.get("key") == key else nothing


def _update(folder: Path, key: str, **results: Any) -> None:
    write_json(folder / EVAL_RESULTS, {**read_eval_results(folder, key), **results, "key": key})


def _select_samples(samples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The first wrong and the first right samples, in their order."""
    wrong = [sample for sample in samples if not sample["right"]]
    right = [sample for sample in samples if sample["right"]]
    num_wrong = min(len(wrong), max(MAX_COMPLETIONS // 2, MAX_COMPLETIONS - len(right)))
    shown = wrong[:num_wrong] + right[: MAX_COMPLETIONS - num_wrong]
    selected = set(map(id, shown))
    return [sample for sample in samples if id(sample) in selected]


def _truncate(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]} … ({len(text) - MAX_CHARACTERS:,} more characters)"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
