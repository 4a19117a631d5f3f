"""The commands that start nothing: `plan`, `check`, `translate`, `schema` and `doctor`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.console import Console
from penstock.cli.options import AsJson, Config, Debug, end
from penstock.config.loading.cli_overrides import Override


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
        """Say what is done, what would run and why, and what it costs."""
        console = Console(as_json, debug)

        def command() -> dict[str, Any]:
            from penstock.cli.plan.costs import Where
            from penstock.cli.plan.stages import explain
            from penstock.cli.run import Request

            request = Request(config, tuple(overrides))
            return explain(request.load(), console, Where(devices, device_kind))

        end(console, command)

    @app.command()
    def check(
        config: Config,
        whole: Annotated[
            bool, typer.Option("--all", help="Print every setting, not only those written.")
        ] = False,
        as_json: AsJson = False,
        debug: Debug = False,
    ) -> None:
        """Check the config, and the data, model and folders it names."""
        console = Console(as_json, debug)

        def command() -> dict[str, Any]:
            from penstock.cli.check import check_run
            from penstock.cli.run import Request

            run = Request(config, tuple(overrides)).load()
            return check_run(run, console, whole=whole)

        end(console, command)

    @app.command()
    def translate(
        file: Annotated[Path, typer.Argument(metavar="FILE", help="Another tool's YAML file.")],
        output: Annotated[
            Path | None,
            typer.Option(
                "-o",
                "--output",
                metavar="NATIVE",
                help="Where to write it, with translation_report.json beside it. Default: stdout.",
            ),
        ] = None,
        world_size: Annotated[
            int | None,
            typer.Option(min=1, help="Fit parallel sizes to so many GPUs. Default: those here."),
        ] = None,
        dialect: Annotated[
            str | None, typer.Option(metavar="NAME", help="What it is written for. Default: told.")
        ] = None,
        strict: Annotated[bool, typer.Option("--strict", help="Refuse unknown keys.")] = False,
        as_json: AsJson = False,
        debug: Debug = False,
    ) -> None:
        """Say another tool's file in our words, key by key."""
        console = Console(as_json, debug)

        def command() -> dict[str, Any]:
            from penstock.cli.translate import Wish, translate_file

            return translate_file(Wish(file, output, world_size, dialect, strict), console)

        end(console, command)

    @app.command()
    def schema(as_json: AsJson = False) -> None:
        """Print the config's JSON Schema, for editors."""
        console = Console(as_json)

        def command() -> dict[str, Any]:
            from penstock.config.generate_docs import schema as json_schema

            found = json_schema()
            console.result(json.dumps(found, indent=2))
            return {"schema": found}

        end(console, command)

    @app.command()
    def doctor(
        measure: Annotated[
            bool,
            typer.Option("--measure", help="Also measure how fast this machine is, for plans."),
        ] = False,
        as_json: AsJson = False,
        debug: Debug = False,
    ) -> None:
        """Look at versions and devices, and say how to mend faults."""
        console = Console(as_json, debug)

        def command() -> dict[str, Any]:
            from penstock.cli.doctor import examine, measured

            return examine(console, measured() if measure else ())

        end(console, command)
