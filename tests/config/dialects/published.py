"""Translates all config files of a folder, checks the results as `penstock check` does with
stand-ins for models and data, and prints what became of them, as a Markdown table.

`python -m tests.config.dialects.published FOLDER`; each folder in FOLDER is a project, as
`tests.config.dialects.mirrors` writes them.
"""

import copy
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from unittest.mock import patch

import yaml

from penstock.cli.translate import as_yaml
from penstock.config.loading.fault import Steps, dotted
from penstock.config.loading.load import loads, read_document
from penstock.config.translate.fit_parallel_sizes import Devices
from penstock.config.translate.load_foreign import load_translation
from penstock.config.translate.translation import FATAL, GAPS, Translation, put_at
from penstock.core.errors import ConfigError
from tests.cli.command import Said, penstock
from tests.config.dialects.stand_ins import StandIns

SUFFIXES = (".yaml", ".yml", ".json")
NO_RUN = (" is no training run: it is ", " is a config of no known tool")
GPUS = 8
OF_THE_REST = "pass without their refused keys"
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
        translation = load_translation(file, None, Devices(GPUS))
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


@dataclass(frozen=True)
class Verdict:
    """What `penstock check` says of a translated file, on a machine with 8 GPUs."""

    code: int
    reasons: tuple[str, ...] = ()
    """First lines of its faults."""
    is_crash: bool = False
    needs: str = ""
    """A package that this machine lacks, if that is the only fault."""


class Judge:
    """Checks translated files. Files that differ in names alone are checked once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stand_ins = StandIns(folder / "models")
        self.known: dict[str, Verdict] = {}

    def check(self, outcome: Outcome) -> Verdict:
        assert outcome.translation
        settings = yaml.safe_load(as_yaml(outcome.translation, outcome.file)) or {}
        for name, value in outcome.translation.placeholders.items():
            put_at(settings, name, copy.deepcopy(value))
        values = self.stand_ins.put(settings, self.folder / "run", outcome.file.stem)
        text = yaml.safe_dump(values)
        if text not in self.known:
            config = self.folder / "run" / "run.yaml"
            config.write_text(text)
            if values["data"].get("skip_prepare_dataset"):
                penstock("prepare", config, "--data.skip_prepare_dataset", "false")
            with patch("penstock.core.env.num_gpus", lambda: GPUS):
                said = penstock("check", config)
            self.known[text] = _verdict(said)
        return self.known[text]


def _verdict(said: Said) -> Verdict:
    is_crash = "Traceback" in said.err or "bug in Penstock" in said.err
    lines = said.err.partition("error: ")[2].splitlines() if said.code else []
    if lines and "checks found a fault" in lines[0]:
        lines = lines[1:]
    # Lines that begin with spaces say what to do, or where.
    reasons = tuple(line for line in lines if line[:1].strip())
    package = re.search(r"requires the (\w+) library", reasons[0]) if len(reasons) == 1 else None
    return Verdict(said.code, reasons, is_crash, package[1] if package else "")


def table(folder: Path, judge: Judge) -> str:
    """The outcomes of all projects in a folder."""
    details: list[str] = []
    counts: dict[str, Counter[str]] = {}
    for project in sorted(path for path in folder.iterdir() if path.is_dir()):
        outcomes = translate_all(project)
        others = [outcome for outcome in outcomes if any(no in outcome.error for no in NO_RUN)]
        refused = [outcome for outcome in outcomes if outcome.error and outcome not in others]
        done = [outcome for outcome in outcomes if outcome.translation]
        gaps = [one.translation for one in done if one.translation and one.translation.of(*GAPS)]
        judged = [(one, judge.check(one)) for one in done]
        # `penstock run` does not start a file with such keys, whatever the rest is.
        without = [verdict for one, verdict in judged if not _is_refused(one)]
        lacking = [verdict for verdict in without if verdict.needs]
        failed = [verdict for verdict in without if verdict.code]
        counts[project.name] = Counter(
            {
                "training configs": len(done) + len(refused),
                "whole": len(done) - len(gaps),
                "with gaps": len(gaps),
                "pass `check`": len(without) - len(failed),
                "keys refused": len(done) - len(without),
                "refused by `check`": len(failed) - len(lacking),
                "needs a package": len(lacking),
                "other files": len(others),
                OF_THE_REST: sum(not verdict.code for one, verdict in judged if _is_refused(one)),
            }
        )
        details += ["", f"**{project.name}**", "", *_gaps(gaps)]
        for outcome in (*refused, *(other for other in others if NO_RUN[1] in other.error)):
            reason = outcome.error.removeprefix(f"{outcome.file} ")
            details.append(f"- not translated: `{outcome.file.relative_to(project)}` {reason}")
        details += [
            f"- without a line: {outcome.missing}" for outcome in outcomes if outcome.missing
        ]
        named = [one for one in done if one.translation and one.translation.placeholders]
        if named:
            details.append(f"- {len(named)} files do not name their data, model or output folder.")
        details += [
            f"- **crash** of check: {one.file}" for one, verdict in judged if verdict.is_crash
        ]
        details += _refusals(verdict for _, verdict in judged if verdict.code)
    return "\n".join([*_counted(counts), *details])


def _counted(counts: Mapping[str, Counter[str]]) -> list[str]:
    """A row for each project and one for all of them, and the shares that pass."""
    total = Counter[str]()
    for count in counts.values():
        total.update(count)
    columns = [name for name in next(iter(counts.values())) if name != OF_THE_REST]
    rows = [f"| project | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, count in (*counts.items(), ("all", total)):
        rows.append(f"| {name} | {' | '.join(str(count[column]) for column in columns)} |")
    configs, passed = total["training configs"], total["pass `check`"]
    written = passed + total[OF_THE_REST]
    startable = configs - total["keys refused"]
    return [
        *rows,
        "",
        f"- written configs that pass, of all: {_share(written, configs)}",
        f"- of the files without a refused key: {_share(passed, startable)}",
        f"- files without a refused key that pass, of all: {_share(passed, configs)}",
    ]


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / max(1, whole):.1f} %)"


def _is_refused(outcome: Outcome) -> bool:
    return bool(outcome.translation and outcome.translation.of(*FATAL))


def _refusals(verdicts: Iterable[Verdict]) -> list[str]:
    """Reasons of `check`, with the number of files."""
    count = Counter(verdict.reasons[0] if verdict.reasons else "" for verdict in verdicts)
    if not count:
        return []
    lines = ["", "| refused by `check` | files |", "|---|---|"]
    for reason, files in sorted(count.items(), key=lambda item: (-item[1], item[0])):
        lines.append(f"| {_cell(reason, 150)} | {files} |")
    return lines


def _cell(text: str, width: int) -> str:
    # Between words: half of a setting's name would be read as another setting.
    shortened = text if len(text) <= width else f"{text[: width - 2].rpartition(' ')[0]} …"
    return shortened.replace("|", chr(92) + "|")


def _gaps(translations: list[Translation]) -> list[str]:
    """Keys that are not translated, with the number of files and the reason."""
    count: Counter[tuple[str, str, str]] = Counter()
    for translation in translations:
        for line in translation.of(*GAPS):
            key = ".".join(part for part in line.key.split(".") if not part.isdecimal())
            count[key, line.kind, line.why] += 1
    lines = ["| key | files | | reason |", "|---|---|---|---|"] if count else []
    for (key, kind, why), files in sorted(count.items(), key=lambda item: (-item[1], item[0])):
        lines.append(f"| `{key}` | {files} | {kind} | {_cell(why, 110)} |")
    return lines


if __name__ == "__main__":
    with TemporaryDirectory() as work:
        print(table(Path(sys.argv[1]), Judge(Path(work))))
