"""The commands `penstock flow` and `penstock deploy`: the pipeline under Prefect."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from penstock.cli.console import Console
from penstock.cli.options import AsJson, Config, Debug, end
from penstock.config.loading.cli_overrides import Override


def add_flow_commands(app: typer.Typer, overrides: Sequence[Override]) -> None:
    """Add them to the command; `overrides` are those of the command line, once they are read."""

    @app.command()
    def flow(
        config: Config,
        recurring: Annotated[
            bool,
            typer.Option("--recurring", help="The flow that trains again as the sources grow."),
        ] = False,
        as_json: AsJson = False,
        debug: Debug = False,
    ) -> None:
        """Run the whole pipeline as a Prefect flow, here and now."""
        console = Console(as_json, debug)

        def command() -> dict[str, Any]:
            from penstock.cli.flow.prefect import run_flow

            return run_flow(config, overrides, console, recurring=recurring)

        end(console, command)

    @app.command()
    def deploy(
        pool: Annotated[
            str, typer.Option(metavar="NAME", help="The work pool, created if there is none.")
        ] = "penstock",
        write_only: Annotated[
            bool, typer.Option("--write-only", help="Write prefect.yaml and ask no server.")
        ] = False,
        as_json: AsJson = False,
        debug: Debug = False,
    ) -> None:
        """Write prefect.yaml and register deployments with Prefect."""
        console = Console(as_json, debug)

        def command() -> dict[str, Any]:
            from penstock.cli.flow.prefect import deploy as register

            return register(pool, console, write_only=write_only)

        end(console, command)
