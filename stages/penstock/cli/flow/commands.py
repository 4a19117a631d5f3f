"""The commands `penstock flow` and `penstock deploy`: the pipeline under Prefect."""

from typing import Annotated, Any

import typer

from penstock.cli.console import Console
from penstock.cli.options import Config, overrides


def flow(
    console: Console,
    config: Config,
    recurring: Annotated[
        bool,
        typer.Option("--recurring", help="The flow that trains again as the sources grow."),
    ] = False,
) -> dict[str, Any]:
    """Run the whole pipeline as a Prefect flow, here and now."""
    from penstock.cli.flow.prefect import run_flow

    return run_flow(config, overrides, console, recurring=recurring)


def deploy(
    console: Console,
    pool: Annotated[
        str, typer.Option(metavar="NAME", help="The work pool, created if there is none.")
    ] = "penstock",
    write_only: Annotated[
        bool, typer.Option("--write-only", help="Write prefect.yaml and ask no server.")
    ] = False,
) -> dict[str, Any]:
    """Write prefect.yaml and register deployments with Prefect."""
    from penstock.cli.flow.prefect import deploy as register

    return register(pool, console, write_only=write_only)
