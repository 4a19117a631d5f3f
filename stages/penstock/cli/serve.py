"""`penstock serve`: runs a training server until it receives a stop signal."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.console import Console
from penstock.cli.options import overrides
from penstock.core.errors import ConfigError

MODES = ("auto", "connect", "workers")


def serve(
    console: Console,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The server's YAML file, flat.")],
    mode: Annotated[
        str,
        typer.Option(
            metavar="|".join(MODES),
            help="Start all processes; all but the workers; or only the workers.",
        ),
    ] = "auto",
    worker_address: Annotated[
        str | None,
        typer.Option(help="connect: address of rank 0, as tcp://host:port."),
    ] = None,
) -> None:
    """Run a training server with the Tinker API.

    Settings are overridden as --server.name value.
    """
    from penstock.config.server.load import load_server
    from penstock.server.launch.prepare import prepare, require_packages
    from penstock.server.launch.supervisor import serve as run

    if mode not in MODES:
        raise ConfigError(f"--mode {mode} is none of {', '.join(MODES)}.")
    require_packages()

    def say(line: str) -> None:
        console.say(f"server: {line}")

    settings = load_server(config, tuple(overrides), say)
    run(prepare(settings, mode, worker_address), say)
