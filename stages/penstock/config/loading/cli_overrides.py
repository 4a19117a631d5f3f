"""Settings on the command line: `--section.field value`, parsed as YAML 1.2."""

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

from penstock.config.loading.fault import Steps
from penstock.core.errors import ConfigError

OPTION = re.compile(r"--(?P<name>[A-Za-z_]\w*(?:\.[\w-]+)+)(?:=(?P<value>.*))?", re.DOTALL)
NUMBER = re.compile(r"-(\.?[0-9]|\.(inf|Inf|INF)$)")


@dataclass(frozen=True)
class Override:
    """One override as typed: its dotted name without dashes, and its value as text."""

    name: str
    text: str

    @property
    def path(self) -> Steps:
        """The parts of the name; numbers are indices of lists."""
        return tuple(int(step) if step.isdecimal() else step for step in self.name.split("."))

    @property
    def option(self) -> str:
        """What the user typed before the value."""
        return f"--{self.name}"


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[Override]]:
    """Split command-line arguments into overrides and the others.

    An override is `--a.b`, with a dot in its name; its value follows after `=` or as the next
    argument, which may begin with a minus only if it is a number. Arguments after `--` are not
    parsed. Raises ConfigError naming every override without a value, or with two.
    """
    remaining: list[str] = []
    overrides: list[Override] = []
    faults: list[str] = []
    arguments = list(argv)
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        if argument == "--":
            remaining += arguments[position - 1 :]
            break
        following = arguments[position] if position < len(arguments) else None
        option = OPTION.fullmatch(argument)
        if not option and OPTION.fullmatch(f"-{argument}"):
            faults.append(f"{argument}: settings have two dashes; write -{argument}")
        elif not option:
            remaining.append(argument)
        elif option["value"] is not None:
            overrides.append(Override(option["name"], option["value"]))
        elif following is None or following.startswith("--"):
            why = f"the value is missing; write {argument} VALUE or {argument}=VALUE"
            faults.append(f"{argument}: {why}")
        elif not following.startswith("-") or NUMBER.match(following):
            overrides.append(Override(option["name"], following))
            position += 1
        else:
            why = f"looks like an option; if it is the value, write {argument}={following}"
            faults.append(f"{argument}: {following} {why}")
    texts: dict[str, str] = {}
    for override in overrides:
        before = texts.setdefault(override.name, override.text)
        if before != override.text:
            faults.append(f"{override.option} is given twice, as {before} and as {override.text}")
    if faults:
        raise ConfigError("\n".join(faults))
    return remaining, overrides


def apply(
    settings: Mapping[str, Any], overrides: Iterable[Override]
) -> tuple[dict[str, Any], list[tuple[Override, str]]]:
    """A copy of `settings` with all overrides applied in order, and the overrides that failed with
    the reason.

    Missing mappings are created; the index one past the end of a list appends.
    """
    changed = deepcopy(dict(settings))
    faults: list[tuple[Override, str]] = []
    for override in overrides:
        value, wrong = parse_value(override.text)
        wrong = wrong or _put(changed, override.path, value)
        if wrong:
            faults.append((override, wrong))
    return changed, faults


def parse_value(text: str) -> tuple[Any, str | None]:
    """The YAML value of `text` and None, or None and an error message."""
    from penstock.config.loading import yaml12  # PyYAML costs `--help` a fifth of its time

    try:
        document = yaml12.parse(text)
    except yaml12.YamlError as fault:
        return None, f"{text!r} is not a YAML value: {fault}; put text in quotes"
    if document.faults:
        return None, document.faults[0].text
    return document.value, None


def _put(settings: dict[str, Any], path: Steps, value: Any) -> str | None:
    # Set the value at `path`; the error message if there is no such place.
    parent: Any = settings
    for depth, step in enumerate(path):
        above = ".".join(map(str, path[:depth]))
        last = depth == len(path) - 1
        empty: Any = value if last else [] if isinstance(path[depth + 1], int) else {}
        if isinstance(parent, list):
            entries = cast("list[Any]", parent)
            if not isinstance(step, int):
                return f"{above} is a list; name an entry by its number, as in {above}.0.{step}"
            if step > len(entries):
                return f"{above} has {len(entries)} entries, so the next is {above}.{len(entries)}"
            if step == len(entries):
                entries.append(empty)
            elif last or entries[step] is None:
                entries[step] = empty
            parent = entries[step]
        elif isinstance(parent, dict):
            names = cast("dict[str, Any]", parent)
            key = str(step)
            if last or names.get(key) is None:
                names[key] = empty
            parent = names[key]
        else:
            return f"{above} is a single value and has no {step}"
    return None
