"""The artifact of a whole flow run: the results of its stages and of training, and what is next."""

import shlex
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact
from pydantic import JsonValue

from parameters import format_value
from penstock.api.report import run_result
from penstock.core.cache.stage import short, stage_key
from penstock.core.cache.store import PlannedStage, StageResult, Status
from penstock.core.errors import Interrupted, PenstockError
from penstock.core.remote.urls import redact_text
from penstock.pipeline.plan import Plan
from penstock.train.report.format import duration, number
from prefect_artifacts import ignore_server_errors
from training_log import Logger

KEY = "penstock-run"

STATUS_WORDS: Mapping[Status, str] = {
    "ran": "built",
    "resumed": "built, resumed",
    "cached": "cached",
    "skipped": "skipped",
}


@contextmanager
def show_overview(
    planned: Plan, chat: Sequence[str], logger: Logger
) -> Generator[list[StageResult]]:
    """Yields a list for the results of the stages, and creates the artifact from it at the end or
    after a failure. `chat` is the command to chat with the model."""
    outcomes: list[StageResult] = []
    try:
        yield outcomes
    except PenstockError as error:
        _create_artifact(planned, outcomes, chat, logger, error)
        raise
    _create_artifact(planned, outcomes, chat, logger, None)


def chat_command(config: Path, overrides: Mapping[str, JsonValue] | None) -> list[str]:
    """The command to chat with the model of this run."""
    typed = [(f"--{name}", format_value(value)) for name, value in (overrides or {}).items()]
    return ["penstock", "chat", str(config), *(argument for pair in typed for argument in pair)]


def _create_artifact(
    planned: Plan,
    outcomes: Sequence[StageResult],
    chat: Sequence[str],
    logger: Logger,
    error: PenstockError | None,
) -> None:
    """Create the artifact `KEY`: the stages, their results, and the error that ended the run."""
    with ignore_server_errors("the table of the run", logger):
        done = {outcome.stage: outcome for outcome in outcomes}
        lines = ["| stage | result | time | key | folder |", "| --- | --- | --- | --- | --- |"]
        lines += [_row(step, done.get(step.stage.name)) for step in planned.steps]
        result = run_result(done)
        if error:
            heading = "Stopped" if isinstance(error, Interrupted) else "Failed"
            lines += [
                "",
                f"**{heading}:**",
                "",
                # Indented by four, text is code in Markdown: paths and signs in it stay.
                *(f"    {line}" for line in str(error).splitlines()),
            ]
        elif facts := list(_result_rows(result)):
            lines += ["", "| result | |", "| --- | --- |"]
            lines += [f"| {name} | {_escape_cell(value)} |" for name, value in facts]
        lines += ["", *(f"- {warning['text']}" for warning in result.get("warnings", ()))]
        if not error and "train" in done:
            lines += ["", f"Next, in {Path.cwd()}:", "", f"    {shlex.join(chat)}"]
        brief = f"{planned.run.pipeline.name}: {_summarize(result, len(done), len(planned.steps))}"
        create_markdown_artifact(redact_text("\n".join(lines)), KEY, brief)


def _row(step: PlannedStage, outcome: StageResult | None) -> str:
    status = STATUS_WORDS[outcome.status] if outcome else "not done"
    time = duration(outcome.seconds) if outcome else ""
    location = step.where if step.remote else str(step.path.absolute())
    key = short(stage_key(step.stage))
    return f"| {step.stage.name} | {status} | {time} | `{key}` | {_escape_cell(location)} |"


def _result_rows(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("steps", "epochs", "tokens"):
        if name in result:
            yield name, f"{result[name]:,}"
    if "final_loss" in result:
        first = result["first_loss"]
        before = "" if first is None else f"{number(first)} at first, "
        yield "loss", f"{before}{number(result['final_loss'])} at last"
    for name in _held_out_losses(result):
        yield f"held-out loss ({name})", number(result[name])
    for name in ("model", "report"):
        if result[name]:
            yield name, str(Path(result[name]).absolute())


def _summarize(result: Mapping[str, Any], done: int, planned: int) -> str:
    parts = [f"{done} of {planned} stages"]
    if "final_loss" in result:
        parts.append(f"{result['steps']:,} steps, loss {number(result['final_loss'])}")
    parts += [f"{name} {number(result[name])}" for name in _held_out_losses(result)]
    return ", ".join(parts)


def _held_out_losses(result: Mapping[str, Any]) -> list[str]:
    return [name for name in result if name.startswith("eval_") and name.endswith("loss")]


def _escape_cell(text: str) -> str:
    return text.replace("|", r"\|")
