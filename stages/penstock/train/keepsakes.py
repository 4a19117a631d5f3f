"""What of an unfinished run is worth keeping elsewhere, and what of it to go on from."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from penstock.core.data_facts import DATA
from penstock.core.files import regular_files
from penstock.train.job import CHECKPOINTS, LOGS, METRICS, RESOLVED

COMPLETE = "COMPLETE"
"""The file that is written last into a checkpoint, so only whole ones have it."""

REPORT = "report.html"

_MARK = re.compile(rf"{CHECKPOINTS}/global_step_(\d+)/{COMPLETE}")


def keepsakes_of(out: Path) -> list[list[Path]]:
    """Each complete checkpoint, its mark after all its files; last, the run's record of itself."""
    groups: list[list[Path]] = []
    for _, mark in _marks(path.relative_to(out).as_posix() for path in _marks_in(out)):
        files = regular_files((out / mark).parent)
        groups += [[path for path in files if path.name != COMPLETE], [out / mark]]
    logs = sorted((out / LOGS).glob("*.log"))
    return [*groups, [out / METRICS, out / RESOLVED, out / DATA, out / REPORT, *logs]]


def wanted_of(names: Collection[str], out: Path) -> list[str]:
    """The files of the newest complete checkpoint among `names`, its mark last, and the metrics
    that lead to it; none when `out` holds one as new.
    """
    there = _marks(names)
    here = _marks(path.relative_to(out).as_posix() for path in _marks_in(out))
    if not there or (here and here[-1][0] >= there[-1][0]):
        return []
    mark = there[-1][1]
    folder = PurePosixPath(mark).parent.as_posix() + "/"
    files = [name for name in names if name.startswith(folder) and name != mark]
    return [*files, *(name for name in names if name == METRICS), mark]


def _marks_in(out: Path) -> list[Path]:
    return list((out / CHECKPOINTS).glob(f"*/{COMPLETE}"))


def _marks(names: Iterable[str]) -> list[tuple[int, str]]:
    """(step, name) of the marks of complete checkpoints, oldest first."""
    return sorted((int(match[1]), name) for name in names if (match := _MARK.fullmatch(name)))
