"""`penstock translate`: translates another tool's config and reports on each of its keys."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.cli.console import Console, table
from penstock.cli.inspect_commands import TranslateOptions
from penstock.config.loading import yaml12
from penstock.config.loading.fault import shown
from penstock.config.translate.fit_parallel_sizes import Devices, devices_here
from penstock.config.translate.load_foreign import load_translation
from penstock.config.translate.translation import (
    GAPS,
    KINDS,
    Kind,
    Line,
    Translation,
    value_at,
)
from penstock.core.errors import ConfigError, StageError
from penstock.core.files import atomic_write, write_json
from penstock.core.os_errors import describe_os_error

REPORT = "translation_report.json"
"""Written beside the translated file."""

MEANING: Mapping[Kind, str] = {
    "refused": "not translated, and the run would train something else without it",
    "unknown": "no known key of that tool",
    "left out": "not supported; the run differs by it",
    "doubtful": "may mean something else in that tool; check each",
    "approximated": "close to the setting, not the same",
    "no effect": "not needed in Penstock",
    "assumed": "not set in the file; this is that tool's default",
    "translated": "the same, with another value or structure",
    "maps": "the same, under another name",
}
COMMENTED: tuple[Kind, ...] = ("assumed", "approximated", "doubtful")
"""Kinds that a comment in the translated file marks."""

WITH_GAPS = 4
"""Exit code if the config was written, without some of the file's keys."""

MISSING = object()

MAX_VALUE_CHARS = 36
"""Maximum characters of a value in a line of the report."""


def translate_file(options: TranslateOptions, console: Console) -> dict[str, Any]:
    """Print the translated config, or write it with the report beside it; log the report. The exit
    code is `WITH_GAPS` if keys are not translated.

    Raises ConfigError if the file is no training config, or with `strict` has gaps or doubtful
    values, and StageError if a file cannot be written.
    """
    devices = Devices(options.world_size) if options.world_size else devices_here()
    translation = load_translation(options.file, options.dialect, devices)
    console.say(report(translation))
    gaps = translation.of(*GAPS)
    if options.strict and (refused := translation.of(*GAPS, "doubtful")):
        reasons = "\n".join(f"  {line.key}: {line.why}" for line in refused)
        raise ConfigError(f"{options.file} cannot be translated\n{reasons}")
    if gaps:
        console.exit_code = WITH_GAPS
        keys = ", ".join(line.key for line in gaps)
        console.say(f"\nwarning: not translated, comments in the result say why: {keys}")
    text = as_yaml(translation, options.file)
    record = as_record(translation)
    if options.output:
        _write(options.output, text, record)
    console.result(str(options.output) if options.output else text.rstrip())
    return {**record, "output": str(options.output) if options.output else None}


def _write(target: Path, text: str, record: Mapping[str, Any]) -> None:
    try:
        with atomic_write(target) as part:
            part.write_text(text, encoding="utf-8")
        write_json(target.with_name(REPORT), record)
    except OSError as error:
        raise StageError(f"{target} cannot be written: {describe_os_error(error)}.") from error


def report(translation: Translation) -> str:
    """The report as text; the kinds that need attention come first."""
    processes = "1 process" if translation.ranks == 1 else f"{translation.ranks} processes"
    blocks = [f"{translation.title}, {len(translation.lines)} keys, fitted to {processes}"]
    for kind in KINDS:
        if lines := translation.of(kind):
            rows = table([_row(line, translation) for line in lines]).splitlines()
            blocks.append("\n  ".join([f"{kind} ({len(lines)}): {MEANING[kind]}", *rows]))
    if translation.placeholders:
        blocks.append(
            f"to be set by hand (not in that tool's file): {', '.join(translation.placeholders)}"
        )
    return "\n\n".join(blocks)


def _row(line: Line, translation: Translation) -> tuple[str, str]:
    native = ", ".join(
        f"{name}: {_shorten(setting)}"
        for name, setting in _native_settings(line, translation).items()
    )
    why = f" ({line.why})" if native and line.why else line.why
    return f"{line.key}: {_shorten(line.redacted_value)}", f"{native}{why}"


def _shorten(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 1]}…"


def _native_settings(line: Line, translation: Translation) -> dict[str, Any]:
    """The Penstock fields that a key decides, with their values."""
    values = {name: value_at(translation.settings, name, MISSING) for name in line.names}
    return {name: value for name, value in values.items() if value is not MISSING}


def as_record(translation: Translation) -> dict[str, Any]:
    """The report as plain values."""
    return {
        "dialect": translation.dialect,
        "processes": translation.ranks,
        "has_doubtful": bool(translation.of("doubtful")),
        "gaps": [line.key for line in translation.of(*GAPS)],
        "counts": {kind: len(translation.of(kind)) for kind in KINDS},
        "keys": [
            {
                "key": line.key,
                "value": line.redacted_value,
                "class": line.kind,
                "native": _native_settings(line, translation),
                "why": line.why,
            }
            for line in translation.lines
        ],
        "to_be_written": list(translation.placeholders),
        "config": translation.settings,
    }


def as_yaml(translation: Translation, source: Path) -> str:
    """The translated file, with a comment where a value is a default or an approximation, and one
    for each key that is not translated, after the setting of the key before it."""
    marks, gaps = _marks(translation), _gap_comments(translation)
    lines = [f"# From {source.name}, written for {translation.title}.", *gaps.get("", ())]
    for section, fields in translation.settings.items():
        lines += [f"{section}:"] if fields else []
        for name, value in (fields or {}).items():
            text = yaml12.dump({name: value}).rstrip()
            mark = marks.get(f"{section}.{name}")
            comment = f"  # {mark}" if mark and "\n" not in text else ""
            lines += [f"  {line}{comment}" for line in text.splitlines()]
            lines += [f"  {text}" for text in gaps.get(f"{section}.{name}", ())]
    lines += [
        f"# {name} has to be set, for example {json.dumps(value)}."
        for name, value in translation.placeholders.items()
    ]
    return "\n".join(lines) + "\n"


def _marks(translation: Translation) -> dict[str, Kind]:
    """Setting to the kind in its comment. A value is assumed if no key of the file decides it."""
    kinds: dict[str, set[Kind]] = {}
    for line in translation.lines:
        for name in line.names:
            kinds.setdefault(name, set()).add(line.kind)
    marks: dict[str, Kind] = {}
    for name, line_kinds in kinds.items():
        for kind in COMMENTED:
            if line_kinds == {kind} or (kind != "assumed" and kind in line_kinds):
                marks[name] = kind
    return marks


def _gap_comments(translation: Translation) -> dict[str, list[str]]:
    """Setting to the comments that follow it; an empty name is the start of the file."""
    comments: dict[str, list[str]] = {}
    above = ""
    for line in translation.lines:
        names = [".".join(name.split(".")[:2]) for name in _native_settings(line, translation)]
        if names and line.kind != "assumed":
            above = names[-1]
        if line.kind in GAPS:
            text = f"# not translated: {line.key}: {shown(line.redacted_value)}: {line.why}"
            comments.setdefault(above, []).append(" ".join(text.split()))
    return comments
