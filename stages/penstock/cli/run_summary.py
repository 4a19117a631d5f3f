"""The summary of `penstock run`: model, report, training metrics and the next commands."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.api.report import run_result
from penstock.cli.console import Console
from penstock.config.loading.cli_overrides import Override
from penstock.core.files import read_json

ADAPTER_CONFIG = "adapter_config.json"

VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank."""

NAME = "mine"
"""The adapter's name in requests to vLLM."""


def print_summary(config: Path, overrides: Sequence[Override], console: Console) -> None:
    """Print the result of a whole run; with --json it is the field `result`."""
    done = {outcome.stage: outcome for outcome in console.outcomes}
    result = run_result(done)
    if result["model"]:
        typed = [
            str(config),
            *(part for override in overrides for part in (override.option, override.text)),
        ]
        result["next"] = shlex.join(["penstock", "chat", *typed])
        result["commands"] = [result["next"]]
        if held_out_losses(result):
            result["commands"].append(shlex.join(["penstock", "eval", *typed]))
        result["commands"] += serving_commands(Path(result["model"]))
    console.more["result"] = result
    rows = [(name, str(result[name])) for name in ("model", "report") if result[name]]
    if "train" in done:
        rows.append(("train", training_numbers(result)))
        if not held_out_losses(result):
            settings = "data.val_set_size, train.eval_steps"
            rows.append(("", f"nothing was evaluated ({settings}), so no number is of new data"))
    if "push" in done:
        rows.append(("pushed", done["push"].where))
    for number, command in enumerate(result.get("commands", ())):
        rows.append(("" if number else "next", command))
    console.result("\n".join(f"{name:7}  {text}" for name, text in rows))


def held_out_losses(result: dict[str, Any]) -> list[str]:
    """The names of the losses on held-out data; empty if the run was not evaluated."""
    return [name for name in result if name.startswith("eval_") and name.endswith("loss")]


def serving_commands(folder: Path) -> list[str]:
    """How vLLM serves an exported model, or an adapter over its base; none for adapters that it
    does not read."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return [shlex.join(["vllm", "serve", str(folder)])]
    adapter = read_json(folder / ADAPTER_CONFIG)
    base, rank = adapter.get("base_model_name_or_path"), adapter.get("r", 0)
    ranks = [candidate for candidate in VLLM_RANKS if candidate >= rank]
    if not base or not ranks or adapter.get("use_dora") or adapter.get("modules_to_save"):
        return []
    over = ["--enable-lora", "--max-lora-rank", str(ranks[0])]
    named = ["--lora-modules", f"{NAME}={folder}"]
    return [shlex.join(["vllm", "serve", base, *over, *named])]


def training_numbers(result: dict[str, Any]) -> str:
    """Steps, tokens and losses in one line."""
    figures = [f"{result[name]:,} {name}" for name in ("steps", "tokens") if name in result]
    if (final_loss := result.get("final_loss")) is not None:
        before = f"{result['first_loss']:.4g} -> " if result["first_loss"] is not None else ""
        figures.append(f"loss {before}{final_loss:.4g}")
    figures += [f"{name} {result[name]:.4g}" for name in held_out_losses(result)]
    return ", ".join(figures)
