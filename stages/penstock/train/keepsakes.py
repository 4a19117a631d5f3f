"""What of an unfinished run is worth keeping elsewhere, and what of it to go on from."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from penstock.core.data_facts import DATA, LINEAGE
from penstock.core.files import regular_files
from penstock.train.job import CHECKPOINTS, LOGS, METRICS, RESOLVED, SAMPLES, SURROUNDINGS

COMPLETE = "COMPLETE"
"""The file that is written last into a checkpoint, so only whole ones have it."""

REPORT = "report.html"

BEST = "BEST"
"""A file in the best checkpoint so far, and in older ones that were it before."""

_MARK = re.compile(rf"{CHECKPOINTS}/global_step_(\d+)/{COMPLETE}")


def keepsakes_of(out: Path) -> list[list[Path]]:
    """Each complete checkpoint, its mark after all its files; last, the run's record of itself."""
    groups: list[list[Path]] = []
    for _, mark in _marks(path.relative_to(out).as_posix() for path in _marks_in(out)):
        files = regular_files((out / mark).parent)
        groups += [[path for path in files if path.name != COMPLETE], [out / mark]]
    logs = sorted((out / LOGS).glob("*.log"))
    files = (METRICS, SAMPLES, f"{CHECKPOINTS}/best", RESOLVED, DATA, LINEAGE, SURROUNDINGS, REPORT)
    return [*groups, [*(out / name for name in files), *logs]]


def wanted_of(names: Collection[str], out: Path) -> list[str]:
    """The files of the newest complete checkpoint among `names` and of the best one, the newest's
    mark last, and what was told on the way to it; none when `out` holds one as new.
    """
    there = _marks(names)
    here = _marks(path.relative_to(out).as_posix() for path in _marks_in(out))
    if not there or (here and here[-1][0] >= there[-1][0]):
        return []
    folders = [PurePosixPath(mark).parent.as_posix() for _, mark in there]
    newest, mark = folders[-1], there[-1][1]
    best = [folder for folder in folders if f"{folder}/{BEST}" in names][-1:]
    beginnings = tuple(f"{folder}/" for folder in {newest, *best})
    files = [name for name in names if name.startswith(beginnings) and name != mark]
    told = (METRICS, SAMPLES, f"{CHECKPOINTS}/best")
    return [*files, *(name for name in names if name in told), mark]


def _marks_in(out: Path) -> list[Path]:
    return list((out / CHECKPOINTS).glob(f"*/{COMPLETE}"))


def _marks(names: Iterable[str]) -> list[tuple[int, str]]:
    """(step, name) of the marks of complete checkpoints, oldest first."""
    return sorted((int(match[1]), name) for name in names if (match := _MARK.fullmatch(name)))
