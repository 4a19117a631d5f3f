"""How `penstock run` ends: model, report, the numbers of training, and the next command."""

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.cli.console import Console
from penstock.config.loading.cli_overrides import Override
from penstock.core.cache.store import StageResult

METRICS, REPORT = "metrics.jsonl", "report.html"


def print_summary(config: Path, overrides: Sequence[Override], console: Console) -> None:
    """Print what came of a whole run; the closing object has it as `result`."""
    done = {outcome.stage: outcome for outcome in console.outcomes}
    result = run_result(done)
    if result["model"]:
        typed = [word for one in overrides for word in (one.option, one.text)]
        result["next"] = shlex.join(["penstock", "chat", str(config), *typed])
    console.more["result"] = result
    rows = [(name, str(result[name])) for name in ("model", "report") if result[name]]
    if "train" in done:
        rows.append(("train", training_numbers(result)))
    if "push" in done:
        rows.append(("pushed", done["push"].where))
    if "next" in result:
        rows.append(("next", result["next"]))
    console.result("\n".join(f"{name:7}  {text}" for name, text in rows))


def run_result(done: dict[str, StageResult]) -> dict[str, Any]:
    """Where the model and the report are, None where there is none; the first loss, and the facts
    of training."""
    train, export = done.get("train"), done.get("export")
    folders = export.facts.get("folders", {}) if export else {}
    model = folders.get("hf", folders.get("adapter"))
    report = train.path / REPORT if train else None
    return {
        "model": str(export.path / model) if export and model else None,
        "report": str(report) if report and report.is_file() else None,
        "first_loss": first_loss(train.path / METRICS) if train else None,
        **(dict(train.facts) if train else {}),
    }


def first_loss(metrics: Path) -> float | None:
    """The loss of the first step that was logged; None where nothing readable was."""
    with suppress(OSError, ValueError), metrics.open(encoding="utf-8") as lines:
        return next((row["loss"] for row in map(json.loads, lines) if "loss" in row), None)
    return None


def training_numbers(result: dict[str, Any]) -> str:
    """Steps, tokens and losses in one line."""
    words = [f"{result[name]:,} {name}" for name in ("steps", "tokens") if name in result]
    if "final_loss" in result:
        before = f"{result['first_loss']:.4g} -> " if result["first_loss"] is not None else ""
        words.append(f"loss {before}{result['final_loss']:.4g}")
    held_out = [name for name in result if name.startswith("eval_") and name.endswith("loss")]
    words += [f"{name} {result[name]:.4g}" for name in held_out]
    return ", ".join(words)
