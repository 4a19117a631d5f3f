"""What many commands take alike, and how each of them ends."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.console import Console, run

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")]
AsJson = Annotated[bool, typer.Option("--json", help="End with one JSON object on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def end(console: Console, command: Callable[[], dict[str, Any] | None]) -> None:
    """Run a command and end the process with its exit status."""
    raise typer.Exit(run(console, command))
