"""The commands `penstock flow` and `penstock deploy`: the pipeline under Prefect."""

from typing import Annotated, Any

import typer

from penstock.cli.console import Console
from penstock.cli.options import Config, run_request


def flow(
    console: Console,
    config: Config,
    recurring: Annotated[
        bool,
        typer.Option("--recurring", help="Run the flow that trains again when the sources grow."),
    ] = False,
) -> dict[str, Any]:
    """Run the whole pipeline as a Prefect flow on this machine."""
    from penstock.cli.flow.prefect import run_flow

    return run_flow(run_request(config), console, recurring=recurring)


def deploy(
    console: Console,
    pool: Annotated[
        str, typer.Option(metavar="NAME", help="The work pool; created if it does not exist.")
    ] = "penstock",
    write_only: Annotated[
        bool, typer.Option("--write-only", help="Only write prefect.yaml; contact no server.")
    ] = False,
) -> dict[str, Any]:
    """Write prefect.yaml and register deployments with Prefect."""
    from penstock.cli.flow.prefect import deploy as register

    return register(pool, console, write_only=write_only)
