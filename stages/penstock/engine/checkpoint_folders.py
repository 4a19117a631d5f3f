"""Where a run's checkpoints lie and what they are called, told from names and marks. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.checkpoint_name import GLOBAL_STEP, step_in
from penstock.config.train import TrainConfig
from penstock.core.errors import ArtifactError
from penstock.core.files import PART, read_json, remove

COMPLETE = "COMPLETE"
"""The file that is written last into a checkpoint, so only whole ones have it."""
STATE = "state.json"
BEST = "best"
"""The file that holds the name of the best checkpoint."""
BEST_MARK = "BEST"
"""A file in it, and in those that were it before: the newest one is. By it the best is found where
there are only names of files."""


@dataclass(frozen=True)
class Naming:
    """What a run calls its checkpoints."""

    template: str = GLOBAL_STEP

    def name(self, step: int, state: Mapping[str, Any]) -> str:
        """Of the checkpoint of this step, whose `state.json` that is."""
        return self.template.format(step=step, consumed_samples=state.get("rows", 0))

    def step_of(self, name: str) -> int | None:
        """The step of the checkpoint that is called so; None if no checkpoint is. One that was
        saved before `train.ckpt_name` was written is called as by default."""
        steps = (step_in(template, name) for template in (self.template, GLOBAL_STEP))
        return next((step for step in steps if step is not None), None)


def naming_of(train: TrainConfig) -> Naming:
    """What a run calls them."""
    return Naming(train.ckpt_name) if train.ckpt_name else Naming()


def read_state(folder: Path) -> dict[str, Any]:
    """The `state.json` of a complete checkpoint. Raises ArtifactError if it is not complete."""
    if not (folder / COMPLETE).is_file():
        raise ArtifactError(
            f"{folder} is not a complete checkpoint: it has no {COMPLETE}.\n"
            "  Name a folder in checkpoints/ whose save ended."
        )
    return read_json(folder / STATE)


def complete_checkpoints(root: Path) -> list[Path]:
    """All complete checkpoints under `root`, whatever they are called, oldest first."""
    found = [
        (step_of(path), path)
        for path in (root.iterdir() if root.is_dir() else ())
        if not path.name.endswith(PART) and (path / COMPLETE).is_file()
    ]
    return [path for _, path in sorted(found)]


def step_of(folder: Path) -> int:
    """The step of a complete checkpoint: by its name where that tells, for states are long where
    ranks are many."""
    step = step_in(GLOBAL_STEP, folder.name)
    return int(read_json(folder / STATE)["step"]) if step is None else step


def checkpoint_of(step: int, root: Path) -> Path | None:
    """The complete checkpoint of `step` under `root`; None if there is none."""
    return next((one for one in complete_checkpoints(root) if step_of(one) == step), None)


def newest_checkpoint(root: Path, key: str) -> Path | None:
    """The newest complete checkpoint under `root` of the run with this key."""
    for folder in reversed(complete_checkpoints(root)):
        if read_state(folder)["key"] == key:
            return folder
    return None


def sweep(root: Path) -> None:
    """Delete what interrupted saves left."""
    for path in root.glob(f"*{PART}") if root.is_dir() else ():
        remove(path)
