"""Build the parser of one command only; typer builds the parsers of all commands."""

from copy import copy

import typer


def select_command(app: typer.Typer, name: str) -> typer.Typer:
    """The app with command `name` only, or the whole app if no command has that name."""
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
