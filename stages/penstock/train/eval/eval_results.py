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

MOST_ANSWERS = 12
"""Maximum number of stored completions; half of them wrong ones, if there are enough of both."""
MOST_CHARACTERS = 2_000
"""Maximum length of each stored text."""
TEXTS = ("prompt", "expected", "answer")


def keep_held_out(folder: Path, key: str, found: Mapping[str, Any]) -> None:
    """Store held-out results for the run with this key in `folder`: `asked`, `right`, `accuracy`,
    `pattern` (of the compared part, or None) and `samples`, each with TEXTS and `right`."""
    samples = [_brief(sample) for sample in _chosen(found["samples"])]
    _keep(folder, key, held_out={**found, "samples": samples, "time": _now()})


def keep_task_scores(
    folder: Path, key: str, scores: Sequence[Mapping[str, Any]], limit: int | None
) -> None:
    """Store task scores (`task`, `metric`, `value`, `stderr`), replacing earlier ones of these
    tasks."""
    again = {score["task"] for score in scores}
    kept = [each for each in kept_eval_results(folder, key)["tasks"] if each["task"] not in again]
    told = [{**score, "limit": limit, "time": _now()} for score in scores]
    _keep(folder, key, tasks=[*kept, *told])


def kept_eval_results(folder: Path, key: str) -> dict[str, Any]:
    """Read `held_out` (None if not evaluated) and `tasks`. Results of another run that used the
    same folder are ignored."""
    path = folder / EVAL_RESULTS
    nothing: dict[str, Any] = {"held_out": None, "tasks": []}
    found = read_json(path) if path.is_file() else nothing
    return {**nothing, **found} if found.get("key") == key else nothing


def _keep(folder: Path, key: str, **results: Any) -> None:
    write_json(folder / EVAL_RESULTS, {**kept_eval_results(folder, key), **results, "key": key})


def _chosen(samples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The first wrong and the first right samples, in their order."""
    of = {is_right: [s for s in samples if s["right"] == is_right] for is_right in (False, True)}
    wrong = min(len(of[False]), max(MOST_ANSWERS // 2, MOST_ANSWERS - len(of[True])))
    kept = {id(sample) for sample in of[False][:wrong] + of[True][: MOST_ANSWERS - wrong]}
    return [sample for sample in samples if id(sample) in kept]


def _brief(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {**sample, **{name: _cut(masked(sample[name])) for name in TEXTS}}


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]} … ({len(text) - MOST_CHARACTERS:,} more characters)"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
