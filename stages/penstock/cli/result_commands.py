"""The commands on trained models: `report`, `merge` and `eval`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.console import Console
from penstock.cli.options import overrides


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
    from penstock.cli.report import write_reports

    return write_reports(folders, output, console)


def merge(
    console: Console,
    base: Annotated[str, typer.Argument(metavar="BASE", help="A model: a folder, or a hub id.")],
    adapter: Annotated[
        str, typer.Argument(metavar="ADAPTER", help="A PEFT adapter: a folder, or a hub id.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="A new folder.")],
) -> dict[str, Any]:
    """Merge a low-rank adapter into its base model."""
    from penstock.cli.merge import merge_adapter

    return merge_adapter(base, adapter, out, console)


def evaluate(
    console: Console,
    target: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG|DIR",
            help="A run's YAML file or output folder, or a model's folder.",
        ),
    ],
    limit: Annotated[
        int | None,
        typer.Option("--n", min=1, help="Held-out prompts (200), or documents of each task (all)."),
    ] = None,
    answer: Annotated[
        str | None,
        typer.Option(
            help="Compare only the first group of the last match of this regular expression, for "
            "example '#### (.+)'."
        ),
    ] = None,
    harness: Annotated[
        str | None,
        typer.Option(metavar="TASKS", help="Run these tasks of the lm-evaluation-harness instead."),
    ] = None,
    harness_tasks: Annotated[
        Path | None, typer.Option(help="A folder with more tasks, in the harness's format.")
    ] = None,
) -> dict[str, Any]:
    """Answer held-out prompts and count exact matches."""
    from penstock.cli.evaluate import EvalOptions, evaluate_target

    tasks = tuple(name.strip() for name in harness.split(",")) if harness else ()
    options = EvalOptions(limit, answer, tasks, harness_tasks)
    return evaluate_target(target, tuple(overrides), options, console)
