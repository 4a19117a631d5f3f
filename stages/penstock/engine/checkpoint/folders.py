"""Checkpoint folders: paths, names, and verification of files by digest. No torch."""

import json
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from penstock.config.schema.checkpoint import GLOBAL_STEP, step_in
from penstock.config.schema.train import TrainConfig
from penstock.core.cache.folder_digests import DIGESTS, DamagedError, FolderDigests
from penstock.core.errors import ArtifactError
from penstock.core.files import PART, remove

# The file that is written last into a checkpoint: only complete ones have it.
COMPLETE = "COMPLETE"
STATE = "state.json"
# The file with the name of the best checkpoint.
BEST = "best"
# A marker file in the best checkpoint and in former best ones; the newest is the best. It
# identifies the best one where only file names are visible.
BEST_MARK = "BEST"
# Suffix of a checkpoint while another one takes its place.
REPLACED = f".replaced{PART}"
# The folder for damaged checkpoints, beside the others.
DAMAGED = "damaged"
# How many errors of a checkpoint a message lists; the rest are counted.
SHOWN = 3


@dataclass(frozen=True)
class CheckpointNaming:
    """How a run names its checkpoints."""

    template: str = GLOBAL_STEP

    def name(self, step: int, state: Mapping[str, Any]) -> str:
        return self.template.format(step=step, consumed_samples=state.get("rows", 0))

    def step_of(self, name: str) -> int | None:
        """The step of a checkpoint with this name; None for other names."""
        # Also by the default naming, for checkpoints saved before `train.ckpt_name` was set.
        steps = (step_in(template, name) for template in (self.template, GLOBAL_STEP))
        return next((step for step in steps if step is not None), None)


def checkpoint_naming(train: TrainConfig) -> CheckpointNaming:
    """The checkpoint naming of a run."""
    return CheckpointNaming(train.ckpt_name) if train.ckpt_name else CheckpointNaming()


def read_state(folder: Path) -> dict[str, Any]:
    """Read the `state.json` of a complete checkpoint. Raises ArtifactError if the checkpoint is
    incomplete or the file damaged."""
    if not (folder / COMPLETE).is_file():
        raise ArtifactError(
            f"{folder} is not a complete checkpoint: it has no {COMPLETE}.\n"
            "  Name a folder in checkpoints/ whose save ended."
        )
    try:
        return _verified_state(folder)[0]
    except DamagedError as error:
        raise damaged_error(folder, [str(error)]) from error


def read_file(folder: Path, name: str) -> bytes:
    """Read a small file of a checkpoint. Raises DamagedError if it differs from what was saved."""
    if digests := FolderDigests.read(folder):
        return digests.content(folder, name)
    try:
        return (folder / name).read_bytes()
    except FileNotFoundError as error:
        raise DamagedError(f"{name} is missing") from error
    except OSError as error:
        raise DamagedError(f"{name} cannot be read ({error.strerror})") from error


def checkpoint_faults(
    folder: Path, *, share: int = 0, of: int = 1, progress: Callable[[], None] = lambda: None
) -> list[str]:
    """Verify the files of a checkpoint by digest and return the errors; empty if there are none.
    Each of `of` readers verifies one `share`. Without digests only `state.json` is checked."""
    if not (folder / COMPLETE).is_file():
        return [f"{COMPLETE} is missing"]
    try:
        _, digests = _verified_state(folder)
    except DamagedError as error:
        return [str(error)]
    return digests.find_damage(folder, share=share, of=of, progress=progress) if digests else []


def damaged_error(folder: Path, faults: Sequence[str]) -> ArtifactError:
    """Build the error for a damaged checkpoint."""
    return ArtifactError(
        f"The checkpoint {folder} is damaged: {in_brief(faults)}.\n"
        "  Take another checkpoint of the run, or restore these files from a copy."
    )


def in_brief(faults: Sequence[str]) -> str:
    """The first errors, and the number of the others."""
    more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    return "; ".join(faults[:SHOWN]) + more


@contextmanager
def understanding(folder: Path) -> Generator[None]:
    """Context manager around uses of `state.json`: raises ArtifactError if its content is invalid,
    as in a damaged checkpoint without digests."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise damaged_error(folder, [f"{STATE} cannot be understood ({error!r})"]) from error


def set_damaged_aside(folder: Path) -> Path:
    """Move a damaged checkpoint to `damaged/` beside it, where none is searched, and return its
    path. Raises OSError if it cannot be moved."""
    target, number = folder.parent / DAMAGED / folder.name, 1
    while target.exists():
        number += 1
        target = target.with_name(f"{folder.name}.{number}")
    target.parent.mkdir(exist_ok=True)
    return folder.rename(target)


def complete_checkpoints(root: Path) -> list[Path]:
    """All complete checkpoints under `root`, with any name, oldest first."""
    steps_and_paths = [
        (checkpoint_step(path), path)
        for path in (root.iterdir() if root.is_dir() else ())
        if not path.name.endswith(PART) and (path / COMPLETE).is_file()
    ]
    return [path for _, path in sorted(steps_and_paths)]


def checkpoint_step(folder: Path) -> int:
    """The step of a complete checkpoint, from its name if possible."""
    # `state.json` is long with many ranks.
    step = step_in(GLOBAL_STEP, folder.name)
    if step is not None:
        return step
    try:
        return int(read_state(folder)["step"])
    except (ArtifactError, KeyError):
        # As the newest, so that it is checked first.
        return sys.maxsize


def find_checkpoint(step: int, root: Path) -> Path | None:
    """The complete checkpoint of `step` under `root`; None if there is none."""
    return next(
        (folder for folder in complete_checkpoints(root) if checkpoint_step(folder) == step), None
    )


def newest_checkpoint(root: Path, keys: Sequence[str]) -> Path | None:
    """The newest complete checkpoint under `root` that `may_belong_to` a run with these keys."""
    newest_first = reversed(complete_checkpoints(root))
    return next((folder for folder in newest_first if may_belong_to(keys, folder)), None)


def may_belong_to(keys: Sequence[str], folder: Path) -> bool:
    """Whether a complete checkpoint is of a run with one of these keys, or too damaged to tell."""
    try:
        return read_state(folder).get("key") in keys
    except ArtifactError:
        return True


def clean_partial_saves(root: Path) -> None:
    """Delete the partial folders of interrupted saves."""
    for path in root.glob(f"*{PART}") if root.is_dir() else ():
        remove(path)


def _verified_state(folder: Path) -> tuple[dict[str, Any], FolderDigests | None]:
    digests = FolderDigests.read(folder)
    try:
        state = json.loads(read_file(folder, STATE))
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{STATE} is not JSON ({error})") from error
    if not isinstance(state, dict):
        raise DamagedError(f"{STATE} is not the state of a checkpoint")
    state = cast("dict[str, Any]", state)
    if digests is None and not isinstance(state.get("step"), int):
        raise DamagedError(f"{STATE} does not say the step")
    # It was saved with digests: without their file, damage to other files would go unseen.
    if digests is None and state.get("digests") is not None:
        raise DamagedError(f"{DIGESTS} is missing")
    return state, digests
