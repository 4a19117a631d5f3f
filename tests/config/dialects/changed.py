"""Copies of config files, each with one key misspelled, with a value of another type, or without
a key that a run needs."""

import copy
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.loading.load import loads, read_document
from penstock.config.translate.apply import detect_dialect, translate
from penstock.config.translate.fit_parallel_sizes import Devices
from penstock.config.translate.load_foreign import drop_invalid, require_known, require_run
from penstock.config.translate.translation import GAPS, Translation
from penstock.core.errors import ConfigError
from tests.config.dialects.published import GPUS, Judge, Outcome

USED = ("maps", "translated")
NEEDED = ("model.model_path", "model.config_path", "data.datasets")
"""Settings without which there is no run."""


@dataclass(frozen=True)
class Change:
    """A changed copy."""

    file: Path
    key: str
    """The changed key, as it is now."""
    values: dict[str, Any]
    what: str


def draw(outcomes: list[Outcome], count: int, seed: int) -> list[Change]:
    """So many changed copies of translated files."""
    rng = random.Random(seed)
    changes: list[Change] = []
    while len(changes) < count:
        outcome = rng.choice(outcomes)
        values: dict[str, Any] = read_document(outcome.file, may_be_empty=False).value
        used = [line.key for line in outcome.translation.of(*USED)] if outcome.translation else []
        keys = [key for key in used if "." not in key and values.get(key) is not None]
        if not keys:
            continue
        if rng.random() < 0.2 and (needed := _needed(outcome, keys)):
            key = rng.choice(needed)
            copied = {name: value for name, value in values.items() if name != key}
            changes.append(Change(outcome.file, key, copied, f"without {key}"))
            continue
        key = rng.choice(keys)
        at = rng.randrange(1, len(key))
        other = key[:at] + key[at - 1] + key[at:]
        if rng.random() < 0.5 and other not in values:
            copied = {(other if name == key else name): value for name, value in values.items()}
            changes.append(Change(outcome.file, other, copied, f"{key} is written {other}"))
        else:
            wrong = _of_another_type(values[key], rng)
            copied = {**copy.deepcopy(values), key: wrong}
            changes.append(Change(outcome.file, key, copied, f"{key}: {wrong!r}"))
    return changes


def _needed(outcome: Outcome, keys: list[str]) -> list[str]:
    assert outcome.translation
    lines = {line.key: line for line in outcome.translation.lines}
    return [key for key in keys if {*NEEDED} & {*lines[key].names}]


def _of_another_type(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return rng.choice([{"x": 1}, ["x"], "perhaps"])
    if isinstance(value, int | float):
        return rng.choice([{"x": 1}, ["x"], "seven"])
    if isinstance(value, str) and value.replace("_", "").isdecimal():
        return rng.choice([{"x": 1}, ["x"]])
    if isinstance(value, str):
        return rng.choice([{"x": 1}, 5])
    return rng.choice([5, "seven"])


def is_told(change: Change, judge: Judge) -> bool:
    """Whether an error, a key that is not translated, a setting that has to be written, or a check
    with stand-ins tells of the change."""
    try:
        translation = _translated(change)
    except ConfigError as error:
        is_unknown = "no known tool" in str(error) or "no training run" in str(error)
        return change.key in str(error) or is_unknown
    if change.key not in change.values:
        return bool({*NEEDED} & translation.placeholders.keys()) or _is_invalid(translation)
    lines = [line for line in translation.lines if line.key.startswith(change.key)]
    if any(line.kind in (*GAPS, "doubtful") for line in lines):
        return True
    names = [name.rpartition(".")[2] for line in lines for name in line.names]
    reasons = judge.check(Outcome(change.file, translation)).reasons
    return any(name in reason for name in names for reason in reasons)


def _is_invalid(translation: Translation) -> bool:
    try:
        loads(translation.settings)
    except ConfigError:
        return True
    return False


def _translated(change: Change) -> Translation:
    require_run(change.file, change.values)
    dialect = detect_dialect(change.values)
    if dialect is None:
        require_known(change.file, change.values)
        raise ConfigError(f"{change.key} is not known")
    return drop_invalid(translate(change.values, dialect, Devices(GPUS), change.file.parent))
