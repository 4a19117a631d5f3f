"""Checkpoint save and resume policy of one run, and the trainer state."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import StageError
from penstock.engine import rng
from penstock.engine.build import BuiltModel
from penstock.engine.checkpoint.checkpoint_manager import CheckpointManager
from penstock.engine.checkpoint.folders import checkpoint_naming, read_state, understanding
from penstock.engine.checkpoint.resume import newest_whole_checkpoint, require_whole
from penstock.engine.checkpoint.train_state import States
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.optim.grad_scaler import GradScaler
from penstock.rows.batches import Cursor
from penstock.train.eval.early_stopping import required_steps
from penstock.train.launch.job import CHECKPOINTS, Job


@dataclass
class TrainerState:
    """Scalar trainer state: steps, epochs, tokens and the data cursor."""

    cursor: Cursor
    """Position in the data of the next step."""
    step: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    loss: float | None = None
    """Loss of the last step that has one."""
    rows: int = 0
    """Number of packed rows trained on."""

    def as_json(self) -> dict[str, Any]:
        """The state as stored in a checkpoint's `state.json`."""
        return {
            "step": self.step,
            "epoch": self.cursor.epoch,
            "samples_consumed": self.cursor.samples,
            "order_seed": self.cursor.seed,
            "group": self.cursor.group,
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "loss": self.loss,
            "rows": self.rows,
        }

    @classmethod
    def of_json(cls, state: Mapping[str, Any]) -> "TrainerState":
        names = ("epoch", "samples_consumed", "order_seed", "group")
        counters = {name: state[name] for name in ("step", "tokens", "trained_tokens", "loss")}
        cursor = Cursor(*(state[name] for name in names))
        return cls(cursor, **counters, rows=state.get("rows", 0))


FORMAT = 3


class Checkpointer:
    """Saves and loads checkpoints. Every rank creates one and makes the same calls."""

    def __init__(
        self, job: Job, built: BuiltModel, ranks: ProcessInfo, warn: Callable[[str], None]
    ) -> None:
        """`warn` receives failed saves that do not stop the run, and missing parts of a
        checkpoint."""
        train = job.config.train
        self._job, self._built, self._ranks, self._warn = job, built, ranks, warn
        self.root = job.output_dir / CHECKPOINTS
        self._checkpoints = CheckpointManager(
            self.root,
            built.train_state,
            ranks,
            writes="behind" if train.save_async else "at_once",
            limit=train.save_total_limit,
            naming=checkpoint_naming(train),
        )
        self._step: int | None = 0
        self._verified: Path | None = None
        """A checkpoint whose files have all been verified."""

    def is_needless(self, step: int) -> bool:
        """Whether the checkpoint of that step exists already, or the run trains nothing."""
        return self._step == step or self._job.config.train.eval_only

    def newest(self) -> Path | None:
        """The newest complete checkpoint of this run. Damaged ones are reported to `warn` and moved
        aside. Raises ArtifactError if all are damaged."""
        self._verified = newest_whole_checkpoint(
            self.root, self._job.keys, self._ranks, self._warn, needs=required_steps
        )
        return self._verified

    def load(self, folder: Path) -> dict[str, Any]:
        """Load a complete checkpoint and return its state.json. Raises ArtifactError on failure."""
        self._verify(folder)
        self._ranks.heartbeat.set_phase("reading the checkpoint")
        states = self._states_of(folder)
        state = self._checkpoints.load(folder, states=states)
        for loss in _lost(state, states):
            self._warn(
                f"{folder} {loss}: from here on the numbers are not those of a run that was never "
                "interrupted"
            )
        with understanding(folder):
            # RNG state belongs to a rank of one parallel layout and cannot be restored on another.
            rng_state = state["rng"].get(str(self._ranks.rank))
            if rng_state and state["layout"] == self._built.layout:
                rng.set_rng_state(rng_state)
            if (scaling := self._built.engine.part(GradScaler)) and "loss_scale" in state:
                scaling.restore(state["loss_scale"])
        # A checkpoint of another folder is none of this run: its step has still to be saved here.
        self._step = state["step"] if folder.parent == self.root else None
        return state

    def load_weights(self, folder: Path) -> None:
        """Load only the weights of a complete checkpoint. Raises ArtifactError."""
        self._verify(folder)
        self._checkpoints.load(folder, states="passed over")

    def save(self, state: TrainerState, more: Mapping[str, Any]) -> None:
        """Save, unless it is needless; `more` is added to state.json. Raises StageError if this
        checkpoint or the previous one cannot be written."""
        if not self.is_needless(state.step):
            self._checkpoints.finish()
            self._write(state, more)

    def try_save(self, state: TrainerState, more: Mapping[str, Any]) -> bool:
        """Save, but only warn if a checkpoint cannot be written. Returns whether a save was
        started."""
        if self.is_needless(state.step):
            return True
        for action in (self._checkpoints.finish, lambda: self._write(state, more)):
            try:
                action()
            except StageError as error:
                self._warn(str(error))
        return self.is_needless(state.step)

    def save_best(self, state: TrainerState, more: Mapping[str, Any]) -> bool:
        """Save as `try_save` does, and mark this checkpoint as the best. Returns whether it was."""
        if not self.try_save(state, more):
            return False
        try:
            self._checkpoints.link_best(state.step)
        except StageError as error:
            self._warn(str(error))
            return False
        return True

    def path_of(self, step: int) -> str:
        """The path of the saved checkpoint of `step` in the output folder."""
        folder = self._checkpoints.folder_of(step)
        assert folder is not None, f"there is no checkpoint of step {step}"
        return f"{CHECKPOINTS}/{folder.name}"

    def keep_best(self, step: int) -> None:
        """Keep the checkpoint of `step`, which was marked as the best, until another one is."""
        self._checkpoints.keep_best(step)

    def finish(self) -> None:
        """Wait until all saves are complete. Raises StageError if one failed on any rank."""
        self._checkpoints.finish()

    def close(self) -> None:
        """Wait for a save in progress, ignoring errors."""
        self._checkpoints.close()

    def _verify(self, folder: Path) -> None:
        # `newest` has just read every byte of this one for its digests.
        if folder != self._verified:
            require_whole(folder, self._ranks)
        if "digests" not in read_state(folder):
            self._warn(
                f"{folder} was saved without digests of its files, so it cannot be verified that "
                "they are what was saved"
            )

    def _states_of(self, folder: Path) -> States:
        """Whether to read the optimizer state. `load_optimizer` only applies to a checkpoint that
        load_checkpoint_path names, or to all if it is "auto"; otherwise the run's own checkpoints
        are always read in full."""
        train = self._job.config.train
        is_named = folder.parent != self.root or train.load_checkpoint_path == "auto"
        return "passed over" if is_named and not train.load_optimizer else "read"

    def _write(self, trainer_state: TrainerState, more: Mapping[str, Any]) -> None:
        self._ranks.heartbeat.set_phase("saving", step=trainer_state.step)
        rng_states = self._ranks.all_gather(rng.get_rng_state())
        scaling = self._built.engine.part(GradScaler)
        state = {
            "format": FORMAT,
            "key": self._job.key,
            "packed_key": self._job.packed_key,
            **trainer_state.as_json(),
            **more,
            **({"loss_scale": scaling.as_json()} if scaling else {}),
            "layout": self._built.layout,
            "rng": {str(rank): state for rank, state in enumerate(rng_states)},
        }
        self._checkpoints.save(trainer_state.step, state)
        self._step = trainer_state.step


def _lost(state: Mapping[str, Any], states: States) -> Iterator[str]:
    """What is lost when resuming from this `state.json`."""
    if state["lacks_optimizer"]:
        yield (
            "was saved without the optimizer's states (train.save_optimizer: false), so the "
            "optimizer starts anew"
        )
    elif states == "passed over":
        yield "gives its weights alone (train.load_optimizer: false), so the optimizer starts anew"
    elif state.get("compresses_states"):
        yield "holds the optimizer's states in few bits (train.ckpt_quant)"
    if state.get("rounds_weights"):
        yield "holds what layers compute with (train.ckpt_weights: compute), rounded"
