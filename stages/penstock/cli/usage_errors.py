"""Errors of the command-line parser, reported like all other errors."""

import re
from collections.abc import Sequence
from typing import Any

from penstock.core.errors import ConfigError

NO_ARGS_ERROR = "NoArgsIsHelpError"
"""Typer's name for a group without a command, whose message is its help."""


def raise_usage_error(error: Any) -> None:
    """Raise ConfigError for an unknown word, with the setting or option that was probably meant;
    SystemExit after printing the help of a group without a command.
    """
    if isinstance(error, ConfigError):
        raise error
    # typer vendors click as a private module, so its errors are told apart by name and attributes.
    if type(error).__name__ == NO_ARGS_ERROR:
        error.show()
        raise SystemExit(error.exit_code)
    # The error for a last option without a value has no context.
    command = error.ctx.command_path if error.ctx else "penstock"
    option = getattr(error, "option_name", None)
    if option and hasattr(error, "possibilities"):
        text = (
            f"{command} has no option {option}{_suggest_option(option, error.possibilities or [])}"
        )
    else:
        text = error.format_message().removesuffix(".") + _suggest_words(error)
    raise ConfigError(f"{text}\n  `{command} --help` lists what it takes.") from None


DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
"""Characters that editors and web pages write for hyphens."""
DASHED = re.compile(rf"-?[{DASHES}][-{DASHES}]*(?P<name>[A-Za-z][\w.-]*)(?:=.*)?", re.DOTALL)


def require_hyphens(arguments: Sequence[str]) -> None:
    """Raise ConfigError for an option that begins with another dash than a hyphen. A word after an
    option may be its value."""
    for before, argument in zip(("", *arguments), arguments, strict=False):
        dashed = DASHED.fullmatch(argument)
        if dashed and not before.startswith("-"):
            hyphens = "-" if len(dashed["name"]) == 1 else "--"
            raise ConfigError(
                f"{argument} begins with a dash that is no hyphen.\n"
                f"  Write {hyphens}{argument[dashed.start('name') :]}."
            )


def require_one_value(command: Any, arguments: Sequence[str]) -> None:
    """Raise ConfigError for an option that is given twice, with two values, and takes one."""
    start = 0
    while start < len(arguments) and arguments[start] in getattr(command, "commands", {}):
        command, start = command.commands[arguments[start]], start + 1
    named = {
        name: param
        for param in command.params
        for name in param.opts
        # Arguments have no `is_flag`; neither they nor flags take a value after their name.
        if not (getattr(param, "is_flag", True) or param.multiple)
    }
    values: dict[str, str] = {}
    for index, argument in enumerate(arguments[start:], start):
        name, is_joined, value = argument.partition("=")
        if name not in named or argument == "--":
            continue
        value = value if is_joined else arguments[index + 1] if index + 1 < len(arguments) else ""
        before = values.setdefault(named[name].name, value)
        if before != value:
            raise ConfigError(f"{name} is given twice, as {before} and as {value}.\n  Write one.")


def _suggest_option(option: str, possibilities: list[str]) -> str:
    """The nearest option of the command, or the setting of that name."""
    from penstock.config.loading.schema_tree import sections
    from penstock.config.loading.suggest_name import suggest

    if option in ("--config", "-c"):
        return "; give the file without an option."
    name = option.lstrip("-").replace("-", "_").rstrip(".")
    if name in sections():
        return (
            f"; {name} is a section: write one of its fields, such as "
            f"--{name}.{next(iter(sections()[name].model_fields))} VALUE"
        )
    setting = suggest((name,))
    if setting and "[]" not in setting:
        return f"; did you mean --{setting}?"
    return f"; did you mean {' or '.join(sorted(possibilities))}?" if possibilities else "."


def _suggest_words(error: Any) -> str:
    """A suggestion for an unexpected word, or for a file in place of a command."""
    message = error.format_message()
    extra = re.search(r"argument\(s\) \((.*)\)", message)
    arguments = extra[1].split() if extra else []
    if settings := [
        f"--{argument}" for argument in arguments if re.match(r"\w+\.[\w.]+=", argument)
    ]:
        return f"; write {' '.join(settings)}"
    file = re.search(r"No such command '(.*\.ya?ml)'", message)
    return f"; write penstock run {file[1]}" if file else ""
