"""The summary of `penstock run`: model, report, training metrics and the next command."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.api.report import run_result
from penstock.cli.console import Console
from penstock.config.loading.cli_overrides import Override


def print_summary(config: Path, overrides: Sequence[Override], console: Console) -> None:
    """Print the result of a whole run; with --json it is the field `result`."""
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


def training_numbers(result: dict[str, Any]) -> str:
    """Steps, tokens and losses in one line."""
    words = [f"{result[name]:,} {name}" for name in ("steps", "tokens") if name in result]
    if "final_loss" in result:
        before = f"{result['first_loss']:.4g} -> " if result["first_loss"] is not None else ""
        words.append(f"loss {before}{result['final_loss']:.4g}")
    held_out = [name for name in result if name.startswith("eval_") and name.endswith("loss")]
    words += [f"{name} {result[name]:.4g}" for name in held_out]
    return ", ".join(words)
