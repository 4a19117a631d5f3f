"""The parser of the one command that is asked for: typer builds those of all commands else."""

from copy import copy

import typer


def only(app: typer.Typer, name: str) -> typer.Typer:
    """The application with command `name` alone, or all of it where there is none of that name."""
    commands = [one for one in app.registered_commands if _name_of(one) == name]
    groups = [one for one in app.registered_groups if one.name == name]
    if not commands and not groups:
        return app
    alone = copy(app)
    alone.registered_commands, alone.registered_groups = commands, groups
    return alone


def _name_of(command: typer.models.CommandInfo) -> str:
    """Its written name, else the one that typer makes of its function's."""
    assert command.callback
    return command.name or command.callback.__name__.replace("_", "-")
