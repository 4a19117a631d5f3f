"""The commands that start nothing: `plan`, `check`, `translate`, `schema` and `doctor`."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from penstock.cli.console import Console
from penstock.cli.options import Config, Strict, run_request
from penstock.core.errors import ConfigError


@dataclass(frozen=True)
class PlanOptions:
    """The options of `penstock plan`."""

    devices: Annotated[
        int | None, typer.Option(min=1, help="Search the fastest layouts on this many devices.")
    ] = None
    device_kind: Annotated[
        str | None, typer.Option(metavar="NAME", help="Devices to plan for, such as H200.")
    ] = None
    """None: the devices of this machine."""
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Run a step of the engine on fake GPUs."),
    ] = False
    world: Annotated[
        int | None, typer.Option(min=1, help="With --dry-run: the number of ranks.")
    ] = None
    """None: the ranks of the run on this machine."""
    ranks: Annotated[
        Literal["roles", "all"],
        typer.Option(help="With --dry-run: one rank per pipeline stage, or all."),
    ] = "roles"
    compare: Annotated[
        list[str],
        typer.Option(metavar="FIELDS", help="With --dry-run: another layout. Repeatable."),
    ] = field(default_factory=list[str])
    """Each as overrides such as `train.tensor_parallel_size=2`."""
    strict: Strict = False
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --dry-run: write a Chrome trace of the step."),
    ] = None


def plan(console: Console, config: Config, options: PlanOptions) -> dict[str, Any]:
    """Print which stages would run and why, and the cost of training."""
    request = run_request(config, strict=options.strict)
    if options.dry_run:
        from penstock.cli.plan.dry_run import dry_run_config

        return dry_run_config(request, options, console)
    if options.world or options.trace or options.compare or options.ranks != "roles":
        raise ConfigError("--world, --ranks, --compare and --trace belong to --dry-run; add it.")
    from penstock.cli.plan.stages import print_plan

    return print_plan(request.load(), console, options)


def check(
    console: Console,
    config: Config,
    all_fields: Annotated[
        bool, typer.Option("--all", help="Print every field, not only those that are set.")
    ] = False,
    strict: Strict = False,
) -> dict[str, Any]:
    """Check the config and the data, model and folders that it names."""
    from penstock.cli.check import check_run

    return check_run(run_request(config, strict=strict).load(), console, all_fields=all_fields)


@dataclass(frozen=True)
class TranslateOptions:
    """The options of `penstock translate`."""

    file: Annotated[Path, typer.Argument(metavar="FILE", help="Another tool's YAML file.")]
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="NATIVE",
            help="Where to write it, with translation_report.json beside it. Default: stdout."
            " Keys that are not translated are comments in it, and the exit code is then 4.",
        ),
    ] = None
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Fit parallel sizes to this many GPUs. Default: the GPUs of this machine."
        ),
    ] = None
    dialect: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The tool that it is written for. Default: detected."),
    ] = None
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Write nothing if a key is not translated or its value is doubtful."
        ),
    ] = False


def translate(console: Console, options: TranslateOptions) -> dict[str, Any]:
    """Translate another tool's config, and report on each key."""
    from penstock.cli.translate import translate_file

    return translate_file(options, console)


def schema(console: Console) -> dict[str, Any]:
    """Print the config's JSON Schema, for editors."""
    from penstock.config.generate_docs import schema as json_schema

    document = json_schema()
    console.result(json.dumps(document, indent=2))
    return {"schema": document}


def doctor(
    console: Console,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Also measure this machine's FLOP/s and bandwidth, for penstock plan."
        ),
    ] = False,
) -> dict[str, Any]:
    """Check versions, devices and packages; say how to fix faults."""
    from penstock.cli.doctor import measure_speed, run_checks

    return run_checks(console, measure_speed() if measure else ())
