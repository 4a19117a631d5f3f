"""The commands on trained models: `report`, `merge` and `eval`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.console import Console
from penstock.cli.options import overrides
from penstock.core.errors import ConfigError, StageError
from penstock.core.os_errors import describe_os_error
from penstock.core.remote.urls import is_url


def report(
    console: Console,
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="train.output_dir(s).")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Page that compares several runs. Default: comparison.html.",
        ),
    ] = None,
) -> dict[str, Any]:
    """Write the report of a run, or a page that compares several."""
    from penstock.train.report import write_comparison, write_report

    if len(folders) == 1 and output is not None:
        raise ConfigError(
            "--output names the page that compares several runs, and one run is named.\n"
            "  Its page is report.html in its own folder; leave --output out."
        )
    target = folders[0] if len(folders) == 1 else output or Path("comparison.html")
    try:
        page = write_report(target) if len(folders) == 1 else write_comparison(folders, target)
    except OSError as error:
        raise StageError(f"no report of {target}: {describe_os_error(error)}.") from error
    console.result(str(page))
    return {"reports": [str(page)]}


def merge(
    console: Console,
    base: Annotated[str, typer.Argument(metavar="BASE", help="A model: a folder, or a hub id.")],
    adapter: Annotated[
        str, typer.Argument(metavar="ADAPTER", help="A PEFT adapter: a folder, or a hub id.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="A new folder.")],
) -> dict[str, Any]:
    """Merge a low-rank adapter into its base model."""
    from penstock.export.merge import merge_folders

    facts = merge_folders(_model_folder(base), _model_folder(adapter), out)
    console.say(f"merged: {facts['changed']} of {facts['tensors']} tensors changed, in {out}")
    return facts


def _model_folder(typed: str) -> Path:
    """A local folder as it is, or a hub repository at its current commit."""
    from penstock.core.sources.hub import MODEL_FILES, local_folder
    from penstock.core.sources.pin import pin_model
    from penstock.export.license import CARD, LICENSE_PATTERNS

    folder = Path(typed).expanduser()
    if folder.is_dir():
        return folder
    if is_url(typed):
        raise ConfigError(f"{typed} is a URL.\n  Copy it to a local folder, and name that.")
    return local_folder(typed, pin_model(typed), (*MODEL_FILES, CARD, *LICENSE_PATTERNS))


@dataclass(frozen=True)
class EvalOptions:
    """The options of `penstock eval`."""

    limit: Annotated[
        int | None,
        typer.Option("--n", min=1, help="Held-out prompts (200), or documents of each task (all)."),
    ] = None
    answer: Annotated[
        str | None,
        typer.Option(
            help="Compare only the first group of the last match of this regular expression, for "
            "example '#### (.+)'."
        ),
    ] = None
    harness: Annotated[
        str | None,
        typer.Option(metavar="TASKS", help="Run these tasks of the lm-evaluation-harness instead."),
    ] = None
    harness_tasks: Annotated[
        Path | None, typer.Option(help="A folder with more tasks, in the harness's format.")
    ] = None

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks of the harness; if there are any, held-out prompts are not evaluated."""
        return tuple(name.strip() for name in self.harness.split(",")) if self.harness else ()


def evaluate(
    console: Console,
    target: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG|DIR",
            help="A run's YAML file or output folder, or a model's folder.",
        ),
    ],
    options: EvalOptions,
) -> dict[str, Any]:
    """Answer held-out prompts and count exact matches."""
    from penstock.cli.evaluate import evaluate_target

    return evaluate_target(target, tuple(overrides), options, console)
