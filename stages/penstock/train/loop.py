"""Epochs, cadences and the clock: from packed rows to a last checkpoint."""

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.config.train import TrainConfig
from penstock.core.errors import ConfigError
from penstock.engine import checkpoint, randomness
from penstock.engine.assemble import Assembled
from penstock.engine.parallel.degrees import accumulation_steps, rows_per_step
from penstock.engine.ranks import Ranks
from penstock.engine.step import StepResult
from penstock.optim.schedule import lr_at
from penstock.rows.batches import Batches, Cursor, Integers, deal
from penstock.rows.reader import PackedRows
from penstock.train.job import CHECKPOINTS, METRICS, Job
from penstock.train.loader import Groups, Loader, Reading, read
from penstock.train.metrics import MetricsLog
from penstock.train.progress import progress
from penstock.train.stopping import StopRequest


@dataclass
class Position:
    """How far the run is. Everything a checkpoint must say besides tensors."""

    cursor: Cursor
    """Where in the data the next step begins."""
    step: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    loss: float | None = None


class Loop:
    """One run of one rank, from the newest checkpoint to the last step or a request to stop."""

    def __init__(self, job: Job, built: Assembled, ranks: Ranks, stop: StopRequest) -> None:
        self.job, self.built, self.ranks, self.stop = job, built, ranks, stop
        self.train: TrainConfig = job.config.train
        self.rows = PackedRows(job.packed / "data" / "train")
        replicas = built.degrees.num_replicas
        self.batches = Batches(
            self._costs(self.rows),
            rows_per_step=rows_per_step(self.train, replicas),
            seed=self.train.seed,
            last_batch="drop" if job.config.data.dataloader_drop_last else "keep",
            epoch_rows=job.epoch_rows,
        )
        self.accumulation = accumulation_steps(self.train, replicas)
        self.reading = Reading.of(job.config, ranks.device)
        self.root = job.output_dir / CHECKPOINTS
        self.checkpoints = checkpoint.Checkpoints(
            self.root,
            built.trained,
            ranks,
            writes="behind" if self.train.save_async else "at_once",
            limit=self.train.save_total_limit,
        )
        self.at = Position(self.batches.start())
        self.total_steps = total_steps(self.train, self.batches, self.at)
        self._loader: Loader | None = None

    def run(self) -> dict[str, Any] | None:
        """Train to the end and return the facts, or None when asked to stop before."""
        self._resume()
        log = MetricsLog(self.job.output_dir / METRICS, self.at.step) if self.ranks.leads else None
        display = (
            progress(self.train.log_format, self.total_steps, self.at.step)
            if self.ranks.leads
            else None
        )
        if self.train.gc_steps:
            gc.disable()
        try:
            while self.at.step < self.total_steps:
                before = self.batches.progress(self.at.cursor)
                record = self._step()
                if log and display:
                    log.append(record)
                    display.show(record)
                stopping = self.ranks.anywhere(bool(self.stop))
                if stopping or self._save_is_due(before):
                    self._save()
                if stopping and self.at.step < self.total_steps:
                    self.checkpoints.finish()
                    return None
                self._tidy()
            facts = self._finish(log)
            self.checkpoints.finish()
            return facts
        finally:
            self.close()
            gc.enable()
            if log and display:
                display.close()
                log.close()

    def close(self) -> None:
        """End what works beside this process: loaders of rows, a save under way."""
        self.checkpoints.close()
        if self._loader:
            self._loader.close()

    def _step(self) -> dict[str, Any]:
        started = time.perf_counter()
        step = self.at.step
        lr = learning_rate(self.train, step, self.total_steps)
        self.ranks.pulse.begins("reading rows", step=step)
        if self._loader is None:
            self._loader = Loader(self.rows, self._steps(), self.reading)
        result: StepResult = self.built.engine.step(next(self._loader), lr, step)
        self.at = Position(
            self.batches.after(self.at.cursor),
            step + 1,
            self.at.tokens + result.tokens,
            self.at.trained_tokens + result.trained_tokens,
            result.loss,
        )
        seconds = time.perf_counter() - started
        return {
            "step": self.at.step,
            "epoch": self._epochs(),
            "loss": result.loss,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "tokens": result.tokens,
            "trained_tokens": result.trained_tokens,
            "tokens_per_second": round(result.tokens / seconds, 1),
            "seconds": round(seconds, 5),
            **result.of_routers,
        }

    @property
    def _replica(self) -> int:
        return self.built.engine.layout.mesh.index("replicate", "shard")

    def _epochs(self) -> float:
        return round(float(self.batches.progress(self.at.cursor)), 4)

    def _costs(self, rows: PackedRows) -> Integers:
        return self.built.pairs_per_token * rows.lengths() + rows.squares()

    def _steps(self) -> Iterator[Groups]:
        """This rank's rows of every step from here to the end."""
        cursor = self.at.cursor
        for _ in range(self.at.step, self.total_steps):
            rows = self.batches.rows(cursor)
            yield self._mine(rows, self.batches.costs, self.accumulation)
            cursor = self.batches.after(cursor)

    def _mine(self, rows: Integers, costs: Integers, count: int) -> Groups:
        return deal(
            rows.tolist(),
            costs[rows].tolist(),
            num_replicas=self.built.degrees.num_replicas,
            size=self.train.micro_batch_size,
            count=count,
        )[self._replica]

    def _resume(self) -> None:
        """Take the newest checkpoint of this run, else the one that was named, else start fresh."""
        if self.ranks.leads:
            checkpoint.sweep(self.root)
        self.ranks.wait()
        folder = newest_checkpoint(self.root, self.job.key)
        named = self.train.load_checkpoint_path
        if folder is None and named not in (None, "auto"):
            folder = Path(named)
        randomness.start(self.train.seed, self.ranks.rank)
        if folder is None:
            return
        state = self.checkpoints.load(folder)
        # RNG belongs to a rank of a layout; on another layout there is none to continue.
        mine = state["rng"].get(str(self.ranks.rank))
        if mine and state["layout"] == self.built.layout:
            randomness.restore(mine)
        self.at = Position(
            self._cursor_of(state),
            state["step"],
            state["tokens"],
            state["trained_tokens"],
            state["loss"],
        )
        self.total_steps = total_steps(self.train, self.batches, self.at)
        if folder.parent != self.root and self.at.step >= self.total_steps:
            raise ConfigError(
                f"train.load_checkpoint_path {named} has taken {self.at.step} steps, and this run "
                f"ends at {self.total_steps}.\n"
                "  Raise train.max_steps or train.num_train_epochs."
            )

    def _cursor_of(self, state: dict[str, Any]) -> Cursor:
        """Where a checkpoint was in these rows; at their beginning if it was in others."""
        if state["packed_key"] != self.job.packed_key:
            return self.batches.start()
        place = (state[name] for name in ("epoch", "samples_consumed", "order_seed", "group"))
        return self.batches.settle(Cursor(*place))

    def _save_is_due(self, before: Fraction) -> bool:
        """Whether to save now; `before` are the epochs that were done a step ago."""
        step, train = self.at.step, self.train
        if step == self.total_steps:
            return True
        if train.save_steps and step % train.save_steps == 0:
            return True
        if not train.save_epochs:
            return False
        interval = Fraction(str(train.save_epochs))
        return self.batches.progress(self.at.cursor) // interval > before // interval

    def _save(self) -> None:
        self.ranks.pulse.begins("saving", step=self.at.step)
        states = self.ranks.gather(randomness.capture())
        at = self.at
        state = {
            "format": 3,
            "key": self.job.key,
            "step": at.step,
            "packed_key": self.job.packed_key,
            "epoch": at.cursor.epoch,
            "samples_consumed": at.cursor.samples,
            "order_seed": at.cursor.seed,
            "group": at.cursor.group,
            "tokens": at.tokens,
            "trained_tokens": at.trained_tokens,
            "loss": at.loss,
            "layout": self.built.layout,
            "rng": {str(rank): state for rank, state in enumerate(states)},
        }
        self.checkpoints.save(at.step, state)

    def _tidy(self) -> None:
        step, train = self.at.step, self.train
        if train.gc_steps and step % train.gc_steps == 0:
            gc.collect()
        on_cuda = self.ranks.device.type == "cuda"
        if on_cuda and train.empty_cache_steps and step % train.empty_cache_steps == 0:
            torch.cuda.empty_cache()

    def _finish(self, log: MetricsLog | None) -> dict[str, Any]:
        at = self.at
        facts: dict[str, Any] = {
            "steps": at.step,
            "epochs": self._epochs(),
            "rows": len(self.rows),
            "rows_per_step": self.batches.rows_per_step,
            "tokens": at.tokens,
            "trained_tokens": at.trained_tokens,
            "final_loss": at.loss,
            "checkpoint": f"{CHECKPOINTS}/global_step_{at.step}",
        }
        if self.built.quantised:
            facts["quantised"] = list(self.built.quantised)
        validation = self.job.packed / "data" / "validation"
        if validation.is_dir():
            facts["eval_loss"] = self._evaluate(PackedRows(validation))
            if log:
                log.append({"step": at.step, "eval_loss": facts["eval_loss"]})
        return facts

    def _evaluate(self, rows: PackedRows) -> float:
        """Mean cross-entropy over the trained tokens of the validation split."""
        at_once = self.built.degrees.num_replicas * self.train.micro_batch_size
        costs = self._costs(rows)
        # Replicas compute rows of similar cost at the same time.
        dearest_first = np.argsort(-costs, kind="stable")
        total, trained = 0.0, 0
        for start in range(0, len(rows), at_once):
            several = dearest_first[start : start + at_once]
            self.ranks.pulse.begins("evaluating")
            mine = read(rows, self._mine(several, costs, 1), self.reading)
            loss, tokens = self.built.engine.evaluate(mine)
            total, trained = total + loss, trained + tokens
        return total / max(1, trained)


def total_steps(train: TrainConfig, batches: Batches, at: Position) -> int:
    """Optimizer steps of the whole run, those that are done included.

    `max_steps` decides alone where it is written, else what is left of the epochs.
    """
    if train.max_steps is not None:
        return train.max_steps
    return at.step + batches.steps_until(train.num_train_epochs, at.cursor)


def learning_rate(train: TrainConfig, step: int, total: int) -> float:
    """The rate for the step numbered `step`, from 0."""
    return lr_at(
        step,
        total,
        lr=train.lr,
        lr_start=train.lr_start,
        lr_min=train.lr_min,
        warmup_ratio=train.lr_warmup_ratio,
        decay_style=train.lr_decay_style,
        decay_ratio=train.lr_decay_ratio,
    )


def newest_checkpoint(root: Path, key: str) -> Path | None:
    """The newest complete checkpoint of the run with this key."""
    for folder in reversed(checkpoint.complete_checkpoints(root)):
        if checkpoint.read_state(folder)["key"] == key:
            return folder
    return None


def check_job(job: Job, vocab_size: int) -> None:
    """Raise ConfigError before the first step if the rows hold tokens that the model does not."""
    if job.max_token_id >= vocab_size:
        raise ConfigError(
            f"the packed rows hold token id {job.max_token_id}, and the model's vocabulary ends at "
            f"{vocab_size - 1}.\n"
            "  model.tokenizer_path and model.config_path do not belong together."
        )
