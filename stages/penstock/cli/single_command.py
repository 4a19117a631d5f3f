"""Build the parsers that a command line needs; typer builds those of all commands."""

from copy import copy
from typing import Any

import typer


def select_command(app: typer.Typer, name: str) -> typer.Typer:
    """The app with command `name` only; for `--help` all commands, without their options; the whole
    app if no command has that name."""
    if name == "--help":
        return _as_listed(app)
    # Without an explicit name typer derives one from the function.
    commands = [
        command
        for command in app.registered_commands
        if name == (command.name or getattr(command.callback, "__name__", "").replace("_", "-"))
    ]
    groups = [group for group in app.registered_groups if group.name == name]
    if not commands and not groups:
        return app
    alone = copy(app)
    alone.registered_commands, alone.registered_groups = commands, groups
    return alone


def _as_listed(app: typer.Typer) -> typer.Typer:
    """The app with what its help shows: commands without parameters, groups without commands."""
    listed = copy(app)
    listed.registered_commands = [_replaced(c, "callback", _bare) for c in app.registered_commands]
    listed.registered_groups = [
        _replaced(g, "typer_instance", _emptied) for g in app.registered_groups
    ]
    return listed


def _replaced(info: Any, name: str, replace: Any) -> Any:
    changed = copy(info)
    setattr(changed, name, replace(getattr(info, name)))
    return changed


def _bare(function: Any) -> Any:
    def without_parameters() -> None: ...

    without_parameters.__name__, without_parameters.__doc__ = function.__name__, function.__doc__
    return without_parameters


def _emptied(group: typer.Typer) -> typer.Typer:
    emptied = copy(group)
    emptied.registered_commands = []
    return emptied
