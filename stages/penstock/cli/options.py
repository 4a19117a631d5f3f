"""Shared options of commands, and how a command is registered and ends."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.console import Console, run
from penstock.config.loading.cli_overrides import Override

if TYPE_CHECKING:  # imported lazily: `--help` imports this module
    from penstock.cli.run import Request

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")]

Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Of another tool's file: refuse keys that are left out or doubtful."
    ),
]

overrides: list[Override] = []
"""Overrides of the command line, `--section.field value`; filled before a command runs."""


def run_request(config: Path, *, strict: bool = False) -> "Request":
    """The config file with the overrides of the command line."""
    from penstock.cli.run import Request

    return Request(config, tuple(overrides), strict)


def add_command(
    app: typer.Typer,
    function: Callable[..., dict[str, Any] | None],
    name: str | None = None,
    *,
    summary: str | None = None,
) -> None:
    """Register a function as a command of `app`, with `--json` and `--debug` after its own options.

    Its first parameter is the `Console`; typer reads the others, of a dataclass its fields. It may
    return fields for the JSON object of `--json`. An error that it raises ends the process with
    that error's exit code.

    Args:
        name: the command's name; default: the function's.
        summary: the command's help; default: the function's docstring.
    """

    def command(*, as_json: bool, debug: bool, **options: Any) -> None:
        console = Console(as_json, debug)
        for name, group in groups.items():
            options[name] = group(
                **{field.name: options.pop(field.name) for field in fields(group)}
            )
        # Raised, as in click's standalone mode a command's return value is no exit code.
        raise typer.Exit(run(console, lambda: function(console, **options)))

    _, *own = inspect.signature(function).parameters.values()
    groups: dict[str, Any] = {
        parameter.name: parameter.annotation
        for parameter in own
        if is_dataclass(parameter.annotation)
    }
    parameters = [
        *(option for parameter in own for option in _options(parameter)),
        _flag("as_json", "--json", "End with one JSON object on stdout."),
        _flag("debug", "--debug", "Show tracebacks."),
    ]
    # typer reads names and defaults from the signature, and types from the annotations.
    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    app.command(name, help=summary)(command)


def _options(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """The parameter itself, or the fields of its dataclass as parameters."""
    if not is_dataclass(parameter.annotation):
        yield parameter
        return
    for field in fields(parameter.annotation):
        default = field.default if field.default is not MISSING else inspect.Parameter.empty
        if field.default_factory is not MISSING:
            # dataclasses refuses a list as a default; typer has no other default for a list.
            default = field.default_factory()
        yield _option(field.name, field.type, default)


def _flag(name: str, option: str, explained: str) -> inspect.Parameter:
    return _option(name, Annotated[bool, typer.Option(option, help=explained)], False)


def _option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=default, annotation=annotation)
