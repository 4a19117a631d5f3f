"""`penstock data show|stats CONFIG`: prints the output of the prepare stage."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from penstock.cli.console import Console
from penstock.cli.options import Config, add_command, run_request

NoUpstream = Annotated[
    bool,
    typer.Option(
        "--no-upstream", help="Fail if the data is not prepared yet, instead of preparing it."
    ),
]


@dataclass(frozen=True)
class SampleSelection:
    """Which samples to show."""

    number: Annotated[int, typer.Option("--n", min=1, help="Number of samples.")] = 3
    split: Annotated[Literal["train", "validation"], typer.Option(help="Which split.")] = "train"
    source: Annotated[
        str | None,
        typer.Option(help="Only samples of this source: its name, or as data.datasets.0."),
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Random seed of the selection. Default: train.seed.")
    ] = None
    index: Annotated[
        list[int],
        typer.Option(help="Show the sample with this index, from 0. Repeatable."),
    ] = field(default_factory=list[int])


def show(
    console: Console,
    config: Config,
    selection: SampleSelection,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page with the samples and their images, instead of printing."),
    ] = None,
    no_upstream: NoUpstream = False,
) -> dict[str, Any]:
    """Print samples as the model sees them, trained tokens marked."""
    from penstock.cli.data.load_prepared import prepared_data
    from penstock.cli.data.show import show_samples

    prepared = prepared_data(run_request(config), console, upstream=not no_upstream)
    return show_samples(prepared, selection, console, html)


def stats(
    console: Console,
    config: Config,
    no_upstream: NoUpstream = False,
) -> dict[str, Any]:
    """Count samples and tokens, and list dropped samples with reasons."""
    from penstock.cli.data.load_prepared import prepared_data
    from penstock.cli.data.stats import show_statistics

    prepared = prepared_data(run_request(config), console, upstream=not no_upstream)
    return show_statistics(prepared, console)


commands = typer.Typer(help="Show prepared samples, or count them.", no_args_is_help=True)
add_command(commands, show)
add_command(commands, stats)
