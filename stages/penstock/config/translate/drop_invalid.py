"""Remove the settings of a translation that are not valid, so that the rest is a run."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from penstock.config.loading.fault import ConfigIssue, dotted, shown
from penstock.config.loading.validate import validate
from penstock.config.translate.translation import GAPS, Draft, Translation, put_at, value_at
from penstock.core.errors import ConfigError

# Settings that every run needs, with values that are used to validate the rest.
PLACEHOLDERS: Mapping[str, Any] = {
    "model.model_path": "path/to/model",
    "data.datasets": [{"path": "data/train.jsonl"}],
    "train.output_dir": "outputs/run",
}

# Removing a setting can uncover errors of others, but only a few times.
MAX_ROUNDS = 20


def drop_invalid(translation: Translation) -> Translation:
    """The translation without invalid settings, whose keys are refused with the reason; settings
    that are missing are among its placeholders.

    Raises ConfigError if an error is of no setting of the file.
    """
    draft = Draft({}, {})
    draft.settings = deepcopy(dict(translation.settings))
    draft.lines = {line.key: line for line in translation.lines}
    placeholders = dict(translation.placeholders)
    issues: list[ConfigIssue] = []
    for _ in range(MAX_ROUNDS):
        settings = deepcopy(draft.settings)
        for name, value in placeholders.items():
            put_at(settings, name, value)
        issues = validate(settings).faults
        if not issues:
            lines = tuple(draft.lines.values())
            return replace(
                translation, settings=draft.settings, lines=lines, placeholders=placeholders
            )
        # The first issue of each path, the last path first: removing an item renumbers those after.
        for issue in {issue.path: issue for issue in reversed(issues)}.values():
            name = dotted(issue.path)
            if name in PLACEHOLDERS and not draft.has(name):
                placeholders[name] = PLACEHOLDERS[name]
            else:
                _drop(draft, issue)
    raise ConfigError("\n".join(f"{dotted(issue.path)}: {issue.text}" for issue in issues))


def _drop(draft: Draft, issue: ConfigIssue) -> None:
    # Remove the setting of an error, or else the first one that the error depends on.
    missing = object()
    for name in (dotted(issue.path), *issue.reads):
        value = draft.value(name, missing)
        if value is missing:
            continue
        for line in draft.lines_of(name):
            line.names = [line_name for line_name in line.names if line_name != name]
            if line.kind == "assumed":
                draft.lines.pop(line.key)
            else:
                line.kind = "refused" if line.kind not in GAPS else line.kind
                line.why = f"here {name}: {shown(value)}, which {issue.text}"
        remove_at(draft.settings, name)
        return
    _drop_item(draft, dotted(issue.path), issue.text)


def _drop_item(draft: Draft, name: str, text: str) -> None:
    # Remove the item of a list that lacks a required setting, and the list if it is empty.
    item = name.rpartition(".")[0]
    above, _, index = item.rpartition(".")
    if not index.isdecimal() or not draft.has(item):
        return
    for line in draft.lines_of(item):
        line.names = [
            line_name for line_name in line.names if not f"{line_name}.".startswith(f"{item}.")
        ]
        if line.kind not in GAPS and not line.names:
            line.kind, line.why = "refused", f"here {name}, which is {text}"
    remove_at(draft.settings, item)
    if not draft.value(above):
        remove_at(draft.settings, above)


def remove_at(settings: dict[str, Any], name: str) -> None:
    """Remove the value at a dotted name in nested mappings and lists."""
    above, _, last = name.rpartition(".")
    parent = value_at(settings, above) if above else settings
    if isinstance(parent, list):
        del parent[int(last)]
    else:
        parent.pop(last)
