"""What the parser of the command line refuses, told and ended as every other error."""

import re
from typing import Any

from penstock.core.errors import ConfigError

NO_ARGS_ERROR = "NoArgsIsHelpError"
"""Typer's name for a group without a command, whose message is its help."""


def raise_usage_error(error: Any) -> None:
    """Raise ConfigError for a word that no command takes, naming the setting or option that was
    meant; SystemExit after the help of a command without words.
    """
    if isinstance(error, ConfigError):
        raise error
    if type(error).__name__ == NO_ARGS_ERROR:
        error.show()
        raise SystemExit(error.exit_code)
    # A last option without its value is refused before there is a context.
    command = error.ctx.command_path if error.ctx else "penstock"
    option = getattr(error, "option_name", None)
    if option and hasattr(error, "possibilities"):
        text = (
            f"{command} has no option {option}{_suggest_option(option, error.possibilities or [])}"
        )
    else:
        text = error.format_message().removesuffix(".") + _suggest_words(error)
    raise ConfigError(f"{text}\n  `{command} --help` lists what it takes.") from None


def _suggest_option(option: str, possibilities: list[str]) -> str:
    """The nearest option of the command, or the setting of that name."""
    from penstock.config.loading.schema_tree import suggestion

    if option in ("--config", "-c"):
        return "; the file stands by itself."
    setting = suggestion((option.lstrip("-").replace("-", "_"),))
    if setting and "[]" not in setting:
        return f"; did you mean --{setting}?"
    return f"; did you mean {' or '.join(sorted(possibilities))}?" if possibilities else "."


def _suggest_words(error: Any) -> str:
    """What was meant by a word where none may stand, or by a file in place of a command."""
    said = error.format_message()
    extra = re.search(r"argument\(s\) \((.*)\)", said)
    words = extra[1].split() if extra else []
    if settings := [f"--{word}" for word in words if re.match(r"\w+\.[\w.]+=", word)]:
        return f"; write {' '.join(settings)}"
    file = re.search(r"No such command '(.*\.ya?ml)'", said)
    return f"; write penstock run {file[1]}" if file else ""
