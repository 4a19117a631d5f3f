"""Resume: choose the newest valid checkpoint, the same on all ranks."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.core.errors import ArtifactError
from penstock.core.replace_folder import restore_replaced
from penstock.engine.checkpoint.folders import (
    COMPLETE,
    DAMAGED,
    REPLACED,
    STATE,
    checkpoint_faults,
    checkpoint_step,
    clean_partial_saves,
    complete_checkpoints,
    damaged_error,
    find_checkpoint,
    in_brief,
    may_belong_to,
    read_state,
    set_damaged_aside,
)
from penstock.engine.checkpoint.safe_dcp_reader import CheckpointFiles
from penstock.engine.distributed.ranks import ProcessInfo

VERIFYING = "verifying the checkpoint"

Needs = Callable[[Mapping[str, Any]], Sequence[int]]
"""The steps of other checkpoints that the one with this `state.json` needs."""


def require_whole(folder: Path, ranks: ProcessInfo) -> None:
    """Raise ArtifactError on all ranks unless every file of a checkpoint is what was saved.

    Collective: each rank verifies a share of the bytes. Without digests only the metadata is read,
    and files are checked for existence and minimum size.
    """
    if not ranks.all_gather((folder / COMPLETE).is_file())[0]:
        # It raises the error that says what is missing.
        read_state(folder)
    if faults := find_checkpoint_faults(folder, ranks):
        raise damaged_error(folder, faults)


def find_checkpoint_faults(folder: Path, ranks: ProcessInfo) -> list[str]:
    """The errors of a checkpoint; a collective call with the same result on all ranks."""
    ranks.heartbeat.set_phase(VERIFYING)
    faults = checkpoint_faults(
        folder,
        share=ranks.rank,
        of=ranks.world_size,
        progress=lambda: ranks.heartbeat.set_phase(VERIFYING),
    )
    if not faults and ranks.is_main_process:
        # All that can be checked of a checkpoint without digests.
        try:
            faults = CheckpointFiles(folder).file_faults()
        except ArtifactError as error:
            faults = [str(error.__cause__ or error)]
    return sorted({fault for rank_faults in ranks.all_gather(faults) for fault in rank_faults})


def newest_whole_checkpoint(
    root: Path,
    keys: Sequence[str],
    ranks: ProcessInfo,
    warn: Callable[[str], None],
    *,
    needs: Needs = lambda _: (),
) -> Path | None:
    """The newest valid checkpoint under `root` of the runs with these keys; None if none is
    complete.

    Its files, and those of the checkpoints that it needs, are verified. Collective. Deletes what
    interrupted saves left, or renames it back; moves newer, damaged checkpoints aside and calls
    `warn` for each. Raises ArtifactError if all are damaged.
    """
    if ranks.is_main_process:
        restore_replaced(root, REPLACED)
    folders = reversed(complete_checkpoints(root)) if ranks.is_main_process else ()
    names = [path.name for path in folders]
    damaged: dict[str, list[str]] = {}
    unusable: dict[str, list[str]] = {}
    chosen: Path | None = None
    # Rank 0's list and answers for all: a network file system may show ranks other folders.
    for name in ranks.all_gather(names)[0]:
        folder = root / name
        if not ranks.all_gather(ranks.is_main_process and may_belong_to(keys, folder))[0]:
            continue
        if faults := find_checkpoint_faults(folder, ranks):
            damaged[name] = faults
        elif faults := _faults_of_needed(folder, ranks, needs):
            unusable[name] = faults
        else:
            chosen = folder
            break
    if chosen is None and (faults_by_name := damaged | unusable):
        lines = "".join(f"\n    {name}: {in_brief(some)}" for name, some in faults_by_name.items())
        raise ArtifactError(
            f"no checkpoint in {root} is valid:{lines}\n"
            "  Restore these files from a copy, or start from scratch with --fresh."
        )
    if ranks.is_main_process:
        clean_partial_saves(root)
        for line in _report_skipped(root, chosen, damaged, unusable):
            warn(line)
    # No rank begins a save before rank 0 has removed the partial ones.
    ranks.barrier()
    return chosen


def _faults_of_needed(folder: Path, ranks: ProcessInfo, needs: Needs) -> list[str]:
    problems: list[str] = []
    for step in needs(read_state(folder)):
        needed = find_checkpoint(step, folder.parent)
        name = needed.name if needed else f"of step {step}"
        faults = find_checkpoint_faults(needed, ranks) if needed else ["it is missing"]
        if faults:
            problems.append(
                f"the best checkpoint until then, {name}, is damaged: {in_brief(faults)}"
            )
    return problems


def _report_skipped(
    root: Path,
    chosen: Path | None,
    damaged: Mapping[str, Sequence[str]],
    unusable: Mapping[str, Sequence[str]],
) -> list[str]:
    """A line for each checkpoint newer than the chosen one; damaged ones are moved aside."""
    end = f"resuming from {chosen.name}" if chosen else "there is none to resume from"
    lines = [
        f"checkpoint {name} is skipped: {in_brief(faults)}; {end}"
        for name, faults in unusable.items()
    ]
    for name, faults in damaged.items():
        try:
            moved = f"it is now {set_damaged_aside(root / name).relative_to(root.parent)}"
        except OSError as error:
            moved = f"it cannot be moved aside ({error.strerror})"
        lines.append(f"checkpoint {name} is damaged: {in_brief(faults)}; {moved}; {end}")
    newest = checkpoint_step(chosen) if chosen else -1
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        is_incomplete = (folder / STATE).is_file() and not (folder / COMPLETE).is_file()
        if is_incomplete and folder.name != DAMAGED and checkpoint_step(folder) > newest:
            lines.append(f"checkpoint {folder.name} has no {COMPLETE} and is skipped; {end}")
    return lines
