"""Files of an incomplete run to upload, and to download for resuming."""

import re
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from penstock.core.cache.data_facts import DATA, LINEAGE
from penstock.core.errors import ArtifactError
from penstock.core.files import regular_files
from penstock.engine.checkpoint.folders import (
    BEST,
    BEST_MARK,
    COMPLETE,
    CheckpointNaming,
    checkpoint_faults,
    checkpoint_step,
    complete_checkpoints,
)
from penstock.train.launch.job import (
    CHECKPOINTS,
    DATA_SAMPLES,
    ENVIRONMENT,
    LOGS,
    METRICS,
    REPORT,
    RESOLVED_CONFIG,
    SAMPLES,
)

_MARKER = re.compile(rf"{CHECKPOINTS}/([^/]+)/{COMPLETE}")

_BEST_CHECKPOINT_FILE = f"{CHECKPOINTS}/{BEST}"


def files_to_upload(out: Path) -> list[list[Path]]:
    """Each complete checkpoint, its completion marker after its files; the run's logs come last."""
    groups: list[list[Path]] = []
    for folder in complete_checkpoints(out / CHECKPOINTS):
        marker = folder / COMPLETE
        groups += [[path for path in regular_files(folder) if path != marker], [marker]]
    logs = sorted((out / LOGS).glob("*.log"))
    logged = (
        METRICS,
        SAMPLES,
        _BEST_CHECKPOINT_FILE,
        RESOLVED_CONFIG,
        DATA,
        LINEAGE,
        DATA_SAMPLES,
        ENVIRONMENT,
        REPORT,
    )
    return [*groups, [*(out / name for name in logged), *logs]]


def files_to_download(names: Collection[str], out: Path, naming: CheckpointNaming) -> list[str]:
    """The files of the newest complete checkpoint among `names` and of the best one, with the
    newest one's completion marker last, and the metrics. Empty if `out` holds a complete checkpoint
    that is as new.

    Raises ArtifactError for a checkpoint whose name does not follow this run's `naming`.
    """
    remote = _completion_markers(names, naming)
    if not remote or _newest_complete_step(out) >= remote[-1][0]:
        return []
    folders = [PurePosixPath(marker).parent.as_posix() for _, marker in remote]
    newest, marker = folders[-1], remote[-1][1]
    best = [folder for folder in folders if f"{folder}/{BEST_MARK}" in names][-1:]
    prefixes = tuple(f"{folder}/" for folder in {newest, *best})
    files = [name for name in names if name.startswith(prefixes) and name != marker]
    logged = (METRICS, SAMPLES, _BEST_CHECKPOINT_FILE)
    return [*files, *(name for name in names if name in logged), marker]


def _newest_complete_step(out: Path) -> int:
    """-1 if no checkpoint is complete."""
    newest_first = reversed(complete_checkpoints(out / CHECKPOINTS))
    return next(
        (checkpoint_step(folder) for folder in newest_first if not checkpoint_faults(folder)), -1
    )


def _completion_markers(names: Collection[str], naming: CheckpointNaming) -> list[tuple[int, str]]:
    """(step, name) of the completion markers, oldest first."""
    markers: list[tuple[int, str]] = []
    for name, match in ((name, _MARKER.fullmatch(name)) for name in names):
        if not match:
            continue
        step = naming.step_of(match[1])
        if step is None:
            raise ArtifactError(
                f"the run has a checkpoint {match[1]}, which train.ckpt_name does not match, so "
                "its step is unknown.\n  Write ckpt_name as it was when the run started."
            )
        markers.append((step, name))
    return sorted(markers)
