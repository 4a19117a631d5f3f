"""Translates all config files of a folder and prints what became of them, as a Markdown table.

`python -m tests.config.dialects.published FOLDER`; each folder in FOLDER is a project.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from penstock.config.loading.fault import Steps, dotted
from penstock.config.loading.load import loads, read_document
from penstock.config.translate.fit_parallel_sizes import Devices
from penstock.config.translate.load_foreign import load_translation
from penstock.config.translate.translation import GAPS, Translation
from penstock.core.errors import ConfigError

SUFFIXES = (".yaml", ".yml", ".json")
NO_RUN = (" is no training run: it is ", " is a config of no known tool")
DESCRIPTIONS = ("dataset_info.json",)
"""Files that others read beside them."""


@dataclass(frozen=True)
class Outcome:
    """What became of a file."""

    file: Path
    translation: Translation | None
    """None: it was refused as a whole, for the reason `error`."""
    error: str = ""
    missing: tuple[str, ...] = ()
    """Keys of the file without a line in the report."""


def translate_all(folder: Path) -> list[Outcome]:
    """Translate every config file below a folder."""
    files = sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES)
    return [translate_one(file) for file in files if file.name not in DESCRIPTIONS]


def translate_one(file: Path) -> Outcome:
    """Translate a file, and validate the result as a run."""
    try:
        translation = load_translation(file, None, Devices(8))
    except ConfigError as error:
        return Outcome(file, None, str(error).splitlines()[0])
    if not translation.placeholders:
        loads(translation.settings)
    missing = keys_without_line(read_document(file, may_be_empty=False).value, translation)
    return Outcome(file, translation, missing=tuple(missing))


def keys_without_line(values: Mapping[str, Any], translation: Translation) -> list[str]:
    """Keys of a file that the report does not name.

    A mapping has one line if its dialect reads it whole, or if it is not translated; the keys of a
    list's items have lines of their own where the list is translated.
    """
    lines = {line.key: line for line in translation.lines}

    def is_named(steps: Steps) -> bool:
        for length in range(len(steps), 0, -1):
            if line := lines.get(dotted(steps[:length])):
                is_item = any(isinstance(step, int) for step in steps[length:])
                return not is_item or line.kind in (*GAPS, "no effect")
        return False

    return [dotted(steps) for steps in _leaves(values) if not is_named(steps)]


def _leaves(value: Any, above: Steps = ()) -> Iterator[Steps]:
    if isinstance(value, dict) and value:
        for name, inner in cast("dict[str, Any]", value).items():
            yield from _leaves(inner, (*above, str(name)))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*above, index))
    else:
        yield above


def table(folder: Path) -> str:
    """The outcomes of all projects in a folder."""
    rows = [
        "| project | training configs | whole | with gaps | refused | other files |",
        "|---|---|---|---|---|---|",
    ]
    details: list[str] = []
    for project in sorted(path for path in folder.iterdir() if path.is_dir()):
        outcomes = translate_all(project)
        others = [outcome for outcome in outcomes if any(no in outcome.error for no in NO_RUN)]
        refused = [outcome for outcome in outcomes if outcome.error and outcome not in others]
        done = [outcome.translation for outcome in outcomes if outcome.translation]
        gaps = [translation for translation in done if translation.of(*GAPS)]
        training = len(done) + len(refused)
        rows.append(
            f"| {project.name} | {training} | {len(done) - len(gaps)} | {len(gaps)} |"
            f" {len(refused)} | {len(others)} |"
        )
        details += ["", f"**{project.name}**", "", *_gaps(gaps)]
        for outcome in (*refused, *(other for other in others if NO_RUN[1] in other.error)):
            reason = outcome.error.removeprefix(f"{outcome.file} ")
            details.append(f"- not translated: `{outcome.file.relative_to(project)}` {reason}")
        details += [
            f"- without a line: {outcome.missing}" for outcome in outcomes if outcome.missing
        ]
        named = [t for t in done if t.placeholders]
        if named:
            details.append(f"- {len(named)} files do not name their data, model or output folder.")
    return "\n".join([*rows, *details])


def _gaps(translations: list[Translation]) -> list[str]:
    """Keys that are not translated, with the number of files and the reason."""
    count: Counter[tuple[str, str, str]] = Counter()
    for translation in translations:
        for line in translation.of(*GAPS):
            key = ".".join(part for part in line.key.split(".") if not part.isdecimal())
            count[key, line.kind, line.why] += 1
    lines = ["| key | files | | reason |", "|---|---|---|---|"] if count else []
    for (key, kind, why), files in sorted(count.items(), key=lambda item: (-item[1], item[0])):
        reason = why if len(why) <= 110 else f"{why[:109]}…"
        lines.append(f"| `{key}` | {files} | {kind} | {reason.replace('|', chr(92) + '|')} |")
    return lines


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
