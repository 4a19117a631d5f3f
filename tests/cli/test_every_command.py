"""What all commands have alike: one clear line of help, and --json."""

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from penstock.cli.main import app
from tests.cli.command import penstock, small_run

BUILDING = ("run", "prepare", "pack", "reference", "train", "export", "push")
DELETING = ("artifacts prune", "releases prune")
WIDTH = 80
"""Columns of a terminal in which no line of a list of commands may be cut."""


def commands(at: Any, *names: str) -> Iterator[tuple[str, Any]]:
    """Every command below one, by the words that name it."""
    inner: dict[str, Any] = getattr(at, "commands", {})
    if not inner:
        yield " ".join(names), at
    for name, each in inner.items():
        yield from commands(each, *names, name)


COMMANDS = dict(commands(typer.main.get_command(app)))


def options(name: str) -> set[str]:
    return {word for each in COMMANDS[name].params for word in each.opts}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_ends_with_an_object_where_it_is_asked_to(name):
    assert "--json" in options(name)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_is_one_line_and_each_of_its_words_is_explained(name):
    command = COMMANDS[name]
    first = command.help.strip().split("\n\n")[0]
    assert first.endswith(".")
    assert len(first) <= WIDTH - 16, first
    assert all(each.help for each in command.params if each.name != "help")


@pytest.mark.parametrize("group", ["", "artifacts", "releases", "data"])
def test_no_line_of_a_list_of_commands_is_cut(group, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    said = penstock(*group.split(), "--help")
    assert said.code == 0
    assert "..." not in said.out.split("Commands:")[1]


@pytest.mark.parametrize("name", [*BUILDING, *DELETING])
def test_what_builds_or_deletes_can_be_asked_what_it_would_do(name):
    assert "--dry-run" in options(name)


def test_a_dry_run_of_every_stage_says_what_would_run_and_makes_nothing(tmp_path):
    config = small_run(tmp_path, push={"url": f"file://{tmp_path}/there"})
    before = sorted(tmp_path.iterdir())
    for name in (name for name in BUILDING if name not in ("reference", "pack")):
        said = penstock(name, config, "--dry-run", "--json")
        assert said.code == 0, said.err
        assert {one["standing"] for one in said.last["plan"]} == {"missing"}
    assert sorted(tmp_path.iterdir()) == before


def test_the_schema_is_printed_or_part_of_the_closing_object():
    assert penstock("schema").out.startswith("{")
    assert "properties" in penstock("schema", "--json").last["schema"]


def test_a_flow_of_a_faulty_config_is_refused_as_a_run_is(tmp_path):
    said = penstock("flow", small_run(tmp_path, train={"lr": "fast"}))
    assert said.code == 2
    assert "wanted a number" in said.err


def test_the_version_and_completion_are_there():
    assert penstock("--version").out.strip()
    assert "--install-completion" in penstock("--help").out
