"""`penstock data show|stats CONFIG`: what the prepare stage made of the data."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer

from penstock.cli.console import Console
from penstock.cli.options import AsJson, Config, Debug, end
from penstock.config.loading.cli_overrides import Override

NoUpstream = Annotated[
    bool, typer.Option("--no-upstream", help="Fail rather than prepare the data.")
]
Split = Literal["train", "validation"]


def data_commands(overrides: Sequence[Override]) -> typer.Typer:
    """The commands; `overrides` is filled before one of them runs."""
    commands = typer.Typer(help="Show prepared samples, or count them.", no_args_is_help=True)

    @commands.command("show")
    def show(
        config: Config,
        number: Annotated[int, typer.Option("--n", min=1, help="How many samples.")] = 3,
        split: Annotated[Split, typer.Option(help="Of which split.")] = "train",
        source: Annotated[
            str | None,
            typer.Option(help="Only of this source: as it is called, or as data.datasets.0."),
        ] = None,
        seed: Annotated[
            int | None, typer.Option(help="Draw other samples. Default: train.seed.")
        ] = None,
        index: Annotated[
            list[int],
            typer.Option(help="Show the sample of this number, from 0. Repeatable."),
        ] = [],  # noqa: B006 - typer reads it and never writes it
        no_upstream: NoUpstream = False,
        as_json: AsJson = False,
        debug: Debug = False,
    ) -> None:
        """Print samples as the model sees them, trained tokens marked."""
        console = Console(as_json, debug)

        def command() -> dict[str, Any]:
            from penstock.cli.data.load_prepared import prepared_data
            from penstock.cli.data.show import Wanted, show_samples
            from penstock.cli.run import Request

            request = Request(config, tuple(overrides))
            prepared = prepared_data(request, console, upstream=not no_upstream)
            wanted = Wanted(split, number, source, seed, tuple(index))
            return show_samples(prepared, wanted, console)

        end(console, command)

    @commands.command("stats")
    def stats(
        config: Config,
        no_upstream: NoUpstream = False,
        as_json: AsJson = False,
        debug: Debug = False,
    ) -> None:
        """Count samples and tokens, and say what was dropped and why."""
        console = Console(as_json, debug)

        def command() -> dict[str, Any]:
            from penstock.cli.data.load_prepared import prepared_data
            from penstock.cli.data.stats import show_statistics
            from penstock.cli.run import Request

            request = Request(config, tuple(overrides))
            prepared = prepared_data(request, console, upstream=not no_upstream)
            return show_statistics(prepared, console)

        end(console, command)

    return commands
