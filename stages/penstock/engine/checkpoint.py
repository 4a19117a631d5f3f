"""Checkpoints: written aside, marked complete, renamed. What is being written is never found.

`<output_dir>/checkpoints/global_step_N/` holds DCP files, `state.json` and, last, `COMPLETE`.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from penstock.core.errors import ArtifactError
from penstock.core.files import PART, fsync, read_json, regular_files, remove, write_json
from penstock.engine.checkpoint_files import CheckpointFiles
from penstock.engine.ranks import Ranks

COMPLETE = "COMPLETE"
STATE = "state.json"
FOLDER = re.compile(r"global_step_(\d+)$")


@dataclass(frozen=True)
class Trained:
    """What a checkpoint holds of a run: the model's parameters and the optimizer's state."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    only_trained: bool
    """Leave out frozen parameters; they are the base model's and are found there."""

    def state(self) -> dict[str, Any]:
        """The sharded state, by names that do not depend on the layout."""
        options = StateDictOptions(
            flatten_optimizer_state_dict=True, ignore_frozen_params=self.only_trained
        )
        own = {name for name, _ in self.model.named_parameters()}
        return {
            "model": {
                name: tensor
                for name, tensor in get_model_state_dict(self.model, options=options).items()
                # A tied head is listed under both its names; it is one tensor.
                if name in own
            },
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=options),
        }

    def restore(self, folder: Path) -> None:
        """Read parameters and optimizer state in place."""
        state = self.state()
        dcp.load(state, storage_reader=CheckpointFiles(folder))
        # Parameters were read into the model's own storage; the optimizer's state was not.
        options = StateDictOptions(
            flatten_optimizer_state_dict=True, ignore_frozen_params=self.only_trained
        )
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=options)


def save(root: Path, step: int, trained: Trained, state: dict[str, Any], ranks: Ranks) -> Path:
    """Write the checkpoint of `step`. Every rank calls it; it is there when it returns.

    `state` is plain JSON, written by the leading rank as `state.json`.
    """
    final = root / f"global_step_{step}"
    aside = root / f"{final.name}{PART}"
    if ranks.leads:
        remove(aside)
        aside.mkdir(parents=True)
    ranks.wait()
    dcp.save(trained.state(), storage_writer=_Writer(aside))
    ranks.wait()
    if ranks.leads:
        write_json(aside / STATE, state)
        (aside / COMPLETE).touch()
        for path in regular_files(aside):
            fsync(path)
        remove(final)
        aside.rename(final)
        fsync(root)
    ranks.wait()
    return final


def load(folder: Path, trained: Trained) -> dict[str, Any]:
    """Restore `trained` from a complete checkpoint, and return its state."""
    state = read_state(folder)
    trained.restore(folder)
    return state


def read_state(folder: Path) -> dict[str, Any]:
    """The `state.json` of a complete checkpoint. Raises ArtifactError if it is not complete."""
    if not (folder / COMPLETE).is_file():
        raise ArtifactError(
            f"{folder} is not a complete checkpoint: it has no {COMPLETE}.\n"
            "  Name a folder called global_step_N whose save ended."
        )
    return read_json(folder / STATE)


def complete_checkpoints(root: Path) -> list[Path]:
    """All complete checkpoints under `root`, oldest first."""
    found = [
        (int(match[1]), path)
        for path in (root.iterdir() if root.is_dir() else ())
        if (match := FOLDER.match(path.name)) and (path / COMPLETE).is_file()
    ]
    return [path for _, path in sorted(found)]


def sweep(root: Path) -> None:
    """Delete what interrupted saves left."""
    for path in root.glob(f"global_step_*{PART}") if root.is_dir() else ():
        remove(path)


class _Writer(FileSystemWriter):
    """DCP's file writer, whose metadata is the same bytes for the same content."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, single_file_per_rank=True, sync_files=True, thread_count=1)

    def storage_meta(self) -> StorageMeta:
        # The default records this machine's path and a random id.
        return StorageMeta(checkpoint_id=None, save_id=None)
