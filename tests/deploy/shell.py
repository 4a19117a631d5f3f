"""Commands as they stand in documents and manifests, and whether the programs would take them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cyclopts
import typer
from prefect.cli import (  # noqa: F401 - each adds its commands
    automation,
    block,
    config,
    deploy,
    deployment,
    flow_run,
    global_concurrency_limit,
    server,
    work_pool,
    work_queue,
    worker,
)
from prefect.cli._app import _app as prefect_app

from penstock.cli.main import app as penstock_app
from penstock.config.loading.cli_overrides import split_overrides
from penstock.config.loading.schema_tree import sections
from penstock.config.server.config import ServerConfig

FENCED = re.compile(r"^[ ]*```sh\n(.*?)^[ ]*```", re.M | re.S)
INLINE = re.compile(r"`((?:penstock|prefect) [^`]+)`")
ASSIGNMENT = re.compile(r"\w+=.*", re.S)
PENSTOCK = typer.main.get_command(penstock_app)
# What typer's own copy of click raises for any words that it does not take.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]
BETWEEN = {"|", "||", "&&", ";", "&", "(", ")"}


def commands_of(text: str, *, inline: bool = False) -> Iterator[list[str]]:
    """Every simple command of a document's shell blocks, and of its `code` where that is asked."""
    for block_of_shell in FENCED.findall(text):
        yield from simple_commands(block_of_shell)
    for line in INLINE.findall(text) if inline else ():
        yield from simple_commands(line)


def simple_commands(script: str) -> Iterator[list[str]]:
    """Words of each command of a script, without assignments, redirections and comments."""
    # A command that is substituted stands for one word.
    script = re.sub(r'"?\$\([^()]*\)"?', "substituted", script.replace("\\\n", " "))
    script = re.sub(r"\s\d?>>?\s*(&\d|\S+)", "", script)
    for line in script.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;()")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word not in BETWEEN:
                words.append(word)
                continue
            if command := _bare(words):
                yield command
            words = []


def _bare(words: list[str]) -> list[str]:
    while words and (ASSIGNMENT.fullmatch(words[0]) or words[0] in ("sudo", "export", "exec")):
        words = words[1:]
    for at, word in enumerate(words):
        # What another program is to run, such as docker compose exec.
        if at == 0 or Path(words[at - 1]).name in ("worker", "worker.py"):
            name = Path(word).name
            if name in ("penstock", "prefect"):
                return [name, *words[at + 1 :]]
    return words


def fault_of(command: list[str]) -> str | None:
    """Why `penstock` or `prefect` would not take these words; None where they would, or for any
    other program. Nothing is run."""
    program, *words = command
    if program == "prefect":
        words = [word for word in words if word != "--no-prompt"]
        try:
            prefect_app.parse_args(words, exit_on_error=False, print_error=False)
        except cyclopts.CycloptsError as error:
            return str(error)
    if program == "penstock":
        words, overrides = split_overrides(words)
        known = {**sections(), "server": ServerConfig}
        for override in overrides:
            section, field = override.name.split(".")[:2]
            if section not in known or field not in known[section].model_fields:
                return f"{override.name} is no setting"
        try:
            _parse(PENSTOCK, program, words)
        except UsageError as error:
            return str(error)
    return None


def _parse(command: Any, name: str, words: list[str]) -> None:
    if words and hasattr(command, "commands"):
        if words[0] not in command.commands:
            raise UsageError(f"{words[0]} is no command of {name}")
        _parse(command.commands[words[0]], words[0], words[1:])
    else:
        command.make_context(name, words)
