"""Checkpoint manager: write to a temporary folder, mark complete, rename.

Partial saves are never found.

A folder in `<output_dir>/checkpoints/` holds DCP files, `state.json`, `digests.json` with the
digests of all of these and, last, `COMPLETE`.
"""

import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from penstock.adapters.names import parse_lora_name
from penstock.core.cache.folder_digests import ALGORITHM, FileDigest, FolderDigests, digest_of_file
from penstock.core.errors import ArtifactError, StageError
from penstock.core.files import PART, atomic_write, fsync, regular_files, remove, write_json
from penstock.core.os_errors import describe_os_error, is_full_disk
from penstock.core.replace_folder import replace_folder
from penstock.engine.checkpoint.async_staging import StagingBuffers
from penstock.engine.checkpoint.dcp_io import Boxes, first_rank_error
from penstock.engine.checkpoint.dcp_writer import write_boxes
from penstock.engine.checkpoint.folders import (
    BEST,
    BEST_MARK,
    COMPLETE,
    REPLACED,
    STATE,
    CheckpointNaming,
    complete_checkpoints,
    find_checkpoint,
    read_state,
    understanding,
)
from penstock.engine.checkpoint.safe_dcp_reader import CheckpointFiles
from penstock.engine.checkpoint.train_state import States, TrainState
from penstock.engine.distributed.ranks import ProcessInfo

# The kinds of content of a checkpoint.
ADAPTERS, MERGED, MODEL = "adapters only", "a model with merged adapters", "a full model"

DEFAULT = CheckpointNaming()


class CheckpointManager:
    """The checkpoints of one run under `root`. Every rank creates one and makes the same calls."""

    def __init__(
        self,
        root: Path,
        trained: TrainState,
        ranks: ProcessInfo,
        *,
        writes: Literal["at_once", "behind"] = "at_once",
        limit: int | None = None,
        naming: CheckpointNaming = DEFAULT,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`behind` writes asynchronously; `limit` keeps so many of the newest checkpoints; `group`
        is a gloo group of all ranks used for nothing else (None: create one)."""
        self.root, self._trained, self._ranks = root, trained, ranks
        self._limit, self._naming = limit, naming
        self._started_from: Path | None = None
        self._best: Path | None = None
        # A separate group: the writer thread must not interleave with the collectives of training.
        save_group = group or dist.new_group(backend="gloo")
        assert isinstance(save_group, dist.ProcessGroup)
        self._group = save_group
        self._copies = StagingBuffers() if writes == "behind" else None
        if self._copies:
            trained.pre_update_hooks.register(self._copies.wait)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def load(self, folder: Path, *, states: States = "read") -> dict[str, Any]:
        """Restore the training state from a complete checkpoint, which `limit` never deletes, and
        return its state.json.

        Raises ArtifactError as `require_loadable`, and if it is damaged or of another model; part
        of the state may have been restored then.
        """
        state = self.require_loadable(folder, states=states)
        self._trained.restore(CheckpointFiles(folder), states=states)
        self._started_from = folder.resolve()
        return state

    def require_loadable(self, folder: Path, *, states: States = "read") -> dict[str, Any]:
        """Return the state.json of a checkpoint without restoring anything.

        Raises ArtifactError if it is incomplete, if the run trained other parts of the model, or if
        it used another optimizer whose states are to be read.
        """
        state, optimizer = read_state(folder), _name_of(self._trained.optimizer)
        with understanding(folder):
            saved_optimizer, kind = str(state["optimizer"]), ADAPTERS
            if not state["adapter_only"]:
                names = CheckpointFiles(folder).read_metadata().state_dict_metadata
                kind = MERGED if any(map(parse_lora_name, names)) else MODEL
        if states == "read" and saved_optimizer != optimizer:
            raise ArtifactError(
                f"{folder} was trained with {saved_optimizer}, and this run's optimizer is "
                f"{optimizer}.\n"
                "  Write the same train.optimizer, or take its weights alone with "
                "train.load_optimizer: false."
            )
        self._require_same_kind(folder, kind)
        return state

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save the checkpoint of `step`, after the previous save has completed.

        `state` is plain JSON, written by rank 0 as `state.json`. Raises StageError if this or the
        previous write failed on any rank.
        """
        self.finish()
        trained = self._trained
        state = {
            **state,
            "optimizer": _name_of(trained.optimizer),
            "adapter_only": trained.only_trained,
            # Whether any optimizer state is left out; the same on all ranks.
            "lacks_optimizer": (
                trained.states == "left out" and self._ranks.any_rank(trained.has_states)
            ),
            "rounds_weights": trained.rounded_to is not None,
            "compresses_states": trained.compresses_states,
            "digests": ALGORITHM,
        }
        # Views: `pre_update_hooks` lets no weight change before they are copied.
        boxes = trained.boxes()
        if (copies := self._copies) is None:
            self._write(step, boxes, state)
            return

        def save_in_background() -> None:
            try:
                self._write(step, self._stage(step, boxes, copies), state)
            except BaseException as error:  # noqa: BLE001 - raised where training meets it
                self._failure = error

        copies.start()
        # A daemon, so that a run that fails does not wait for it to end.
        self._thread = threading.Thread(
            target=save_in_background, name="penstock-checkpoint", daemon=True
        )
        self._thread.start()

    def link_best(self, step: int) -> None:
        """Make `best` name the checkpoint of `step`, which was saved, and keep it. Raises
        StageError if it could not be saved, or `best` cannot be written."""
        self.finish()
        folder = self.folder_of(step)
        assert folder is not None, f"there is no checkpoint of step {step}"
        try:
            self._on_main_process(lambda: _write_best_file(folder, self.root / BEST))
        except OSError as error:
            raise StageError(
                f"{self.root / BEST} cannot be written: {_explain_write_error(error, self.root)}.\n"
                "  Make room in train.output_dir."
            ) from error
        self.keep_best(step)

    def keep_best(self, step: int) -> None:
        """Keep the checkpoint of `step`, if it exists, until another one is the best."""
        folder = self.folder_of(step)
        self._best = folder and folder.resolve()

    def finish(self) -> None:
        """Wait until the save is complete. Raises StageError if it failed on any rank."""
        self.close()
        if failure := self._failure:
            self._failure = None
            raise failure

    def close(self) -> None:
        """Wait for the write in progress and ignore its result, when the run ends with an error
        anyway."""
        # The writer threads of all ranks finish among themselves, even if training failed on one.
        if self._thread:
            self._thread.join()
            self._thread = None

    def folder_of(self, step: int) -> Path | None:
        return find_checkpoint(step, self.root)

    def _require_same_kind(self, folder: Path, saved_kind: str) -> None:
        # A checkpoint of another kind lacks parts of the model, or has parts that would be dropped.
        kind = ADAPTERS
        if not self._trained.only_trained:
            has_adapters = any(parse_lora_name(param.name) for param in self._trained.params)
            # A pipeline stage may have no adapters.
            kind = MERGED if self._ranks.any_rank(has_adapters) else MODEL
        if saved_kind != kind:
            raise ArtifactError(
                f"{folder} holds {saved_kind}, and this run trains {kind}.\n"
                "  Write the lora section as it was, or export that run and start from its weights "
                "as model.model_path."
            )

    def _stage(self, step: int, boxes: Boxes, copies: StagingBuffers) -> Boxes:
        copied, fault = boxes, None
        try:
            copied = copies.stage(boxes)
        except (RuntimeError, MemoryError) as error:
            fault = str(error)
        faults: list[str | None] = [None] * self._ranks.world_size
        # Before anything is written: otherwise the other ranks would wait in `dcp.save`.
        dist.all_gather_object(faults, fault, group=self._group)
        if stage_faults := [fault for fault in faults if fault is not None]:
            raise StageError(
                f"the checkpoint of step {step} could not be copied to the host's memory: "
                f"{stage_faults[0]}.\n"
                "  The ones before it are intact; without train.save_async no copy is made."
            )
        return copied

    def _write(self, step: int, boxes: Boxes, state: dict[str, Any]) -> None:
        final = self.root / self._naming.name(step, state)
        aside = self.root / f"{final.name}{PART}"
        try:
            # An interrupted save of this step may have left files there.
            self._on_main_process(lambda: (remove(aside), aside.mkdir(parents=True)))
            written = write_boxes(boxes, aside, self._group)
            digests_by_rank = [written] * self._ranks.world_size
            dist.all_gather_object(digests_by_rank, written, group=self._group)
            digests = {name: digest for own in digests_by_rank for name, digest in own.items()}
            self._on_main_process(lambda: _publish(aside, final, state, digests))
            # Only when the new one is complete: a crash in between leaves one too many.
            self._on_main_process(lambda: self._delete_old(final))
        except (OSError, CheckpointException) as error:
            # Rank 0's reason: it reads the free disk space before the partial save is deleted.
            why = [_explain_write_error(error, self.root)]
            dist.broadcast_object_list(why, src=0, group=self._group)
            # A partial save would use the disk space that the next save needs.
            with suppress(OSError):
                self._on_main_process(lambda: remove(aside))
            raise StageError(
                f"the checkpoint of step {step} could not be written: {why[0]}.\n"
                "  The ones before it are intact; make room in train.output_dir and run again."
            ) from error

    def _on_main_process(self, act: Callable[[], object]) -> None:
        """Run `act` on rank 0 while the others wait. All raise OSError if it failed."""
        outcome: list[OSError | None] = [OSError("rank 0 failed")]
        try:
            if self._ranks.is_main_process:
                act()
            outcome = [None]
        except OSError as error:
            outcome = [error]
        finally:
            # Also if another exception is raised: the other ranks must not wait forever.
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[0] is not None:
            raise outcome[0]

    def _delete_old(self, newest: Path) -> None:
        if self._limit is None:
            return
        protected = {self._started_from, self._best, newest.resolve()}
        # Folders with other names, such as a user's copy, are not the run's to delete.
        folders = [
            folder
            for folder in complete_checkpoints(self.root)
            if self._naming.step_of(folder.name) is not None
        ]
        for folder in folders[: -self._limit]:
            if folder.resolve() not in protected:
                # Rename first, so that the rest of an interrupted deletion is cleaned up later.
                aside = folder.with_name(f"{folder.name}{PART}")
                remove(aside)
                remove(folder.rename(aside))


def _name_of(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__.lower()


def _publish(
    aside: Path, final: Path, state: dict[str, Any], written: dict[str, FileDigest]
) -> None:
    write_json(aside / STATE, state)
    FolderDigests({**written, STATE: digest_of_file(aside / STATE)}).write(aside)
    (aside / COMPLETE).touch()
    # Before the rename, so that after a crash a complete name stands for files on disk.
    for path in (*regular_files(aside), aside):
        fsync(path)
    if old := replace_folder(aside, final, final.with_name(f"{final.name}{REPLACED}")):
        remove(old)


def _explain_write_error(error: BaseException, folder: Path) -> str:
    cause = first_rank_error(error)
    if is_full_disk(cause):
        with suppress(OSError):
            free = shutil.disk_usage(folder).free
            return f"the disk of {folder} is full ({free / 1e6:.1f} MB are left there)"
    return describe_os_error(cause) if isinstance(cause, OSError) else str(cause)


def _write_best_file(folder: Path, file: Path) -> None:
    # The mark first, so that `best` never names a folder without it.
    (folder / BEST_MARK).touch()
    fsync(folder)
    with atomic_write(file) as part:
        part.write_text(f"{folder.name}\n")
