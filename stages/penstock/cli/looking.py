"""The commands that look and change nothing: `plan`, `check`, `schema` and `doctor`."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.console import Console, run
from penstock.config.overrides import Override

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")]
AsJson = Annotated[bool, typer.Option("--json", help="End with one JSON object on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def add_looking(app: typer.Typer, overrides: Sequence[Override]) -> None:
    """Add them to the command; `overrides` are those of the command line, once they are read."""

    @app.command()
    def plan(
        config: Config,
        devices: Annotated[
            int | None, typer.Option(min=1, help="Look for the fastest layouts on so many devices.")
        ] = None,
        device_kind: Annotated[
            str | None, typer.Option(metavar="NAME", help="Devices to plan for, such as H200.")
        ] = None,
        as_json: AsJson = False,
        debug: Debug = False,
    ) -> None:
        """Say which stages are done, why others have to run, and what training will cost."""
        console = Console(as_json, debug)

        def command() -> dict[str, Any]:
            from penstock.cli.costs import Where
            from penstock.cli.explain import explain
            from penstock.cli.run import Request

            request = Request(config, tuple(overrides))
            return explain(request.load(), console, Where(devices, device_kind))

        _end(console, command)

    @app.command()
    def check(config: Config, as_json: AsJson = False, debug: Debug = False) -> None:
        """Check the config and print it in full, with every default."""
        console = Console(as_json, debug)

        def command() -> dict[str, Any]:
            from penstock.cli.run import Request
            from penstock.cli.show import show_config

            return show_config(Request(config, tuple(overrides)).load(), console)

        _end(console, command)

    @app.command()
    def schema() -> None:
        """Print the config's JSON Schema, for editors."""

        def command() -> None:
            from penstock.config.reference import schema as json_schema

            print(json.dumps(json_schema(), indent=2))

        _end(Console(), command)

    @app.command()
    def doctor(
        measure: Annotated[
            bool,
            typer.Option("--measure", help="Also measure how fast this machine is, for plans."),
        ] = False,
        as_json: AsJson = False,
        debug: Debug = False,
    ) -> None:
        """Look at versions, devices and optional packages, and say how to mend what is wrong."""
        console = Console(as_json, debug)

        def command() -> dict[str, Any]:
            from penstock.cli.doctor import examine, measured

            return examine(console, measured() if measure else ())

        _end(console, command)


def _end(console: Console, command: Callable[[], dict[str, Any] | None]) -> None:
    raise typer.Exit(run(console, command))
