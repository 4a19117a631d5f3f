"""The commands that start nothing: `plan`, `check`, `translate`, `schema` and `doctor`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.console import Console
from penstock.cli.options import Config, run_request


def plan(
    console: Console,
    config: Config,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Look for the fastest layouts on so many devices.")
    ] = None,
    device_kind: Annotated[
        str | None, typer.Option(metavar="NAME", help="Devices to plan for, such as H200.")
    ] = None,
) -> dict[str, Any]:
    """Say what is done, what would run and why, and what it costs."""
    from penstock.cli.plan.costs import DeviceOptions
    from penstock.cli.plan.stages import print_plan

    return print_plan(run_request(config).load(), console, DeviceOptions(devices, device_kind))


def check(
    console: Console,
    config: Config,
    whole: Annotated[
        bool, typer.Option("--all", help="Print every setting, not only those written.")
    ] = False,
) -> dict[str, Any]:
    """Check the config, and the data, model and folders it names."""
    from penstock.cli.check import check_run

    return check_run(run_request(config).load(), console, whole=whole)


def translate(
    console: Console,
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
) -> dict[str, Any]:
    """Say another tool's file in our words, key by key."""
    from penstock.cli.translate import TranslateOptions, translate_file

    return translate_file(TranslateOptions(file, output, world_size, dialect, strict), console)


def schema(console: Console) -> dict[str, Any]:
    """Print the config's JSON Schema, for editors."""
    from penstock.config.generate_docs import schema as json_schema

    found = json_schema()
    console.result(json.dumps(found, indent=2))
    return {"schema": found}


def doctor(
    console: Console,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Also measure how fast this machine is, for plans."),
    ] = False,
) -> dict[str, Any]:
    """Look at versions and devices, and say how to mend faults."""
    from penstock.cli.doctor import measure_speed, run_checks

    return run_checks(console, measure_speed() if measure else ())
