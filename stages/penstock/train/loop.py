"""Epochs, cadences and the clock: from packed rows to a last checkpoint."""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.config.train import TrainConfig
from penstock.core.errors import ConfigError
from penstock.engine import checkpoint, randomness
from penstock.engine.assemble import Assembled
from penstock.engine.parallel.degrees import accumulation_steps, rows_per_step
from penstock.engine.ranks import Ranks
from penstock.engine.step import StepResult
from penstock.optim.schedule import lr_at
from penstock.rows.batches import Batches, micro_batches, share
from penstock.rows.collate import MicroBatch, collate
from penstock.rows.reader import PackedRows
from penstock.train.job import CHECKPOINTS, METRICS, Job
from penstock.train.metrics import MetricsLog
from penstock.train.progress import progress
from penstock.train.stopping import StopRequest


@dataclass
class Position:
    """How far the run is. Everything a checkpoint must say besides tensors."""

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
            num_rows=len(self.rows),
            rows_per_step=rows_per_step(self.train, replicas),
            seed=self.train.seed,
            last_batch="drop" if job.config.data.dataloader_drop_last else "keep",
        )
        self.accumulation = accumulation_steps(self.train, replicas)
        self.total_steps = total_steps(self.train, self.batches)
        self.root = job.output_dir / CHECKPOINTS
        self.at = Position()

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
                record = self._step()
                if log and display:
                    log.append(record)
                    display.show(record)
                stopping = self.ranks.anywhere(bool(self.stop))
                if stopping or self._save_is_due():
                    self._save()
                if stopping and self.at.step < self.total_steps:
                    return None
                self._tidy()
            return self._finish(log)
        finally:
            gc.enable()
            if log and display:
                display.close()
                log.close()

    def _step(self) -> dict[str, Any]:
        started = time.perf_counter()
        step = self.at.step
        lr = learning_rate(self.train, step, self.total_steps)
        mine = share(self.batches.rows(step), self._replica, self.built.degrees.num_replicas)
        result: StepResult = self.built.engine.step(self._micro_batches(mine), lr)
        self.at = Position(
            step + 1,
            self.at.tokens + result.tokens,
            self.at.trained_tokens + result.trained_tokens,
            result.loss,
        )
        seconds = time.perf_counter() - started
        return {
            "step": self.at.step,
            "epoch": round(self.at.step / self.batches.steps_per_epoch, 4),
            "loss": result.loss,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "tokens": result.tokens,
            "trained_tokens": result.trained_tokens,
            "tokens_per_second": round(result.tokens / seconds, 1),
            "seconds": round(seconds, 5),
        }

    @property
    def _replica(self) -> int:
        return self.ranks.rank % self.built.degrees.num_replicas

    def _micro_batches(self, rows: list[int]) -> list[MicroBatch]:
        groups = micro_batches(rows, self.train.micro_batch_size, self.accumulation)
        return [self._collate(group, self.rows) for group in groups]

    def _collate(self, group: Sequence[int], rows: PackedRows) -> MicroBatch:
        data = self.job.config.data
        batch = collate(
            [rows.row(index) for index in group], pad_to_multiple_of=data.pad_to_multiple_of
        )
        pins = data.dataloader_pin_memory and self.ranks.device.type == "cuda"
        return batch.pin_memory() if pins else batch

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
        state = checkpoint.load(folder, self.built.trained)
        # RNG belongs to a rank of a layout; on another layout there is none to continue.
        mine = state["rng"].get(str(self.ranks.rank))
        if mine and state["layout"] == self.built.layout:
            randomness.restore(mine)
        self.at = Position(state["step"], state["tokens"], state["trained_tokens"], state["loss"])
        if folder.parent != self.root and self.at.step >= self.total_steps:
            raise ConfigError(
                f"train.load_checkpoint_path {named} has taken {self.at.step} steps, and this run "
                f"ends at {self.total_steps}.\n"
                "  Raise train.max_steps or train.num_train_epochs."
            )

    def _save_is_due(self) -> bool:
        step, train = self.at.step, self.train
        if step == self.total_steps:
            return True
        if train.save_steps and step % train.save_steps == 0:
            return True
        if not train.save_epochs:
            return False
        interval = train.save_epochs * self.batches.steps_per_epoch
        return int(step / interval) > int((step - 1) / interval)

    def _save(self) -> None:
        states = self.ranks.gather(randomness.capture())
        at, batches = self.at, self.batches
        epoch, step_in_epoch = divmod(at.step, batches.steps_per_epoch)
        state = {
            "format": 1,
            "key": self.job.key,
            "step": at.step,
            "epoch": epoch,
            "samples_consumed": step_in_epoch * batches.rows_per_step,
            "tokens": at.tokens,
            "trained_tokens": at.trained_tokens,
            "loss": at.loss,
            "layout": self.built.layout,
            "adapter_only": self.built.trained.only_trained,
            "rng": {str(rank): state for rank, state in enumerate(states)},
        }
        checkpoint.save(self.root, at.step, self.built.trained, state, self.ranks)

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
            "epochs": round(at.step / self.batches.steps_per_epoch, 4),
            "rows": len(self.rows),
            "rows_per_step": self.batches.rows_per_step,
            "tokens": at.tokens,
            "trained_tokens": at.trained_tokens,
            "final_loss": at.loss,
            "checkpoint": f"{CHECKPOINTS}/global_step_{at.step}",
        }
        validation = self.job.packed / "data" / "validation"
        if validation.is_dir():
            facts["eval_loss"] = self._evaluate(PackedRows(validation))
            if log:
                log.append({"step": at.step, "eval_loss": facts["eval_loss"]})
        return facts

    def _evaluate(self, rows: PackedRows) -> float:
        """Mean cross-entropy over the trained tokens of the validation split."""
        replicas, size = self.built.degrees.num_replicas, self.train.micro_batch_size
        total, trained = 0.0, 0
        for start in range(0, len(rows), size * replicas):
            several = list(range(start, min(start + size * replicas, len(rows))))
            mine = self._collate(share(several, self._replica, replicas), rows)
            loss, tokens = self.built.engine.evaluate([mine])
            total, trained = total + loss, trained + tokens
        return total / max(1, trained)


def total_steps(train: TrainConfig, batches: Batches) -> int:
    """Optimizer steps of the whole run. `max_steps` decides alone where it is written."""
    if train.max_steps is not None:
        return train.max_steps
    return train.num_train_epochs * batches.steps_per_epoch


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
