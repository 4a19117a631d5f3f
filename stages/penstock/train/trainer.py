"""Training loop of one rank, from the newest checkpoint to the end of the run or a stop request.

After a step come, in this order: its record, a save, an evaluation, sample prompts. A checkpoint
stores which of these are still pending for its step, so that a resumed run does them first.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import torch

from penstock.config.schema.train import TrainConfig
from penstock.core.cache.data_facts import read_data_facts
from penstock.core.errors import ConfigError
from penstock.engine import rng
from penstock.engine.build import BuiltModel
from penstock.engine.checkpoint.folders import understanding
from penstock.engine.device import empty_cache
from penstock.engine.distributed.parallel_dims import accumulation_steps, rows_per_step
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.optim.changed_weights import FEW_CHANGED, rounding_warning
from penstock.engine.step_part import TokenCounts
from penstock.engine.train_step import Prefetch, StepResult
from penstock.optim.schedule import lr_at
from penstock.rows.batches import StepSampler
from penstock.rows.collate import MicroBatch
from penstock.rows.sizing import Finding, findings, run_size
from penstock.train.checkpointing import Checkpointer, TrainerState
from penstock.train.dataloader import Groups, Loader, LoaderConfig, trained_rows
from penstock.train.duration import WallClock, build_duration
from penstock.train.eval.early_stopping import EarlyStopping
from penstock.train.eval.evaluator import build_evaluator
from penstock.train.eval.metrics import LOSS
from penstock.train.eval.reference_model import build_ref_model
from penstock.train.eval.sample_prompts import build_sample_generator
from penstock.train.launch.job import METRICS, SAMPLES, Job
from penstock.train.launch.stop_request import StopRequest
from penstock.train.metrics.environment import write_environment
from penstock.train.metrics.jsonl import MetricsLog, read_metrics
from penstock.train.metrics.profiler import StepProfiler
from penstock.train.metrics.recorder import MetricsRecorder
from penstock.train.metrics.step_metrics import StepMetrics
from penstock.train.row_costs import local_micro_batches, row_costs

GO_ON, TIME_IS_UP, STOP = 0, 1, 2
"""Stop flag after a step, max-reduced over ranks."""

Duty = Literal["evaluation", "samples"]


class Trainer:
    """The state of a run, and its training loop."""

    def __init__(self, job: Job, built: BuiltModel, ranks: ProcessInfo, stop: StopRequest) -> None:
        self.job, self.built, self.ranks, self.stop = job, built, ranks, stop
        self.train: TrainConfig = job.config.train
        self.rows = trained_rows(job)
        replicas = built.dims.num_replicas
        costs = row_costs(built, self.rows)
        self._work = costs.total
        self.batches = StepSampler(
            costs.text,
            rows_per_step=rows_per_step(self.train, replicas),
            seed=self.train.seed,
            last_batch=job.config.data.last_batch,
            epoch_rows=job.epoch_rows,
        )
        self.accumulation = accumulation_steps(self.train, replicas)
        self.reading = LoaderConfig.of(job.config, ranks.device)
        self.saves = Checkpointer(job, built, ranks, self._warn)
        self.references = build_ref_model(job, built, ranks, self.rows, self.batches)
        self.held_out = build_evaluator(job, built, ranks, self.reading, self.batches.rows_per_step)
        self.sampler = build_sample_generator(job, built, ranks)
        self.judge = EarlyStopping(self.train.save_best, self.train.early_stopping)
        self.judge.require_metrics(self.held_out.names if self.held_out else ())
        self.profile = StepProfiler(self.train, ranks, job.key[:8])
        self.measures = StepMetrics(built, self.rows, self.train, ranks, self._warn)
        self.clock = WallClock(self.train.max_hours)
        self.at = TrainerState(self.batches.start())
        self.budget = build_duration(self.train, self.batches, self.rows.lengths(), self.at)
        self._started_at = 0
        """The step at which this start of the run began."""
        self._untrained: int | None = 0
        """The step of the initial weights; None: this run has trained them before."""
        self._memory: Sequence[int] = (0, 0)
        """Peak memory over all ranks, encoded as in `measures`, and reserved memory."""
        self._batches: Sequence[MicroBatch] = []
        """Prefetched micro-batches of the next step."""
        self._counts: TokenCounts | None = None
        """Their tokens over all ranks."""
        self._polled = GO_ON
        """The stop flag of all ranks in the last step."""
        self._evaluated: dict[str, Any] | None = None
        """The metrics of this step's evaluation."""
        self._loader: Loader | None = None
        self._recorder: MetricsRecorder | None = None
        self._rounds_to_nearest = (
            self.train.keeps_in == "bfloat16" and not self.train.compensates_rounding
        )
        self._warmup_steps = self.train.warmup_steps(self.total_steps)
        self._early_warnings: list[str] = []
        """From before the recorder was opened."""
        self._samples: MetricsLog | None = None

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run, including completed ones."""
        return self.budget.total_steps

    def run(self) -> dict[str, Any] | None:
        """Train to the end and return the facts, or None if asked to stop earlier."""
        due = self._resume()
        # After the weights are loaded, once per machine, as each may have files of its own.
        if self.ranks.local_rank == 0:
            self.job.require_unchanged_sources()
        self._open()
        if self.train.gc_steps:
            # Python collects at other steps on each rank, and all ranks wait for one that does.
            gc.disable()
        try:
            ended_by = self._train_steps(due)
            self.saves.finish()
            if ended_by and self._recorder:
                # Only once all saves are complete: trackers then close the run for good.
                self._recorder.ending = "finished"
            return self._facts(ended_by) if ended_by else None
        finally:
            self.close()
            gc.enable()
            for log in (self._recorder, self._samples):
                if log:
                    log.close()

    def close(self) -> None:
        self.profile.close(self.at.step)
        self.saves.close()
        self.measures.close()
        if self._loader:
            self._loader.close()

    def _train_steps(self, due: set[Duty]) -> str | None:
        """Run the steps; returns what ended the run, or None if asked to stop earlier."""
        # Clocks and signals may differ between ranks.
        [stop_flag] = self.ranks.max_over_ranks(self._stop_flag())
        self._sanity_check_eval(due, stop_flag)
        while True:
            stopped = stop_flag == STOP and (bool(due) or not self._ended_by(stop_flag))
            if stopped or not self._run_due_evals(due, stop_flag):
                self.saves.save(self.at, self._trainer_state(due))
                return None
            if ended_by := self._ended_by(stop_flag):
                self.saves.save(self.at, self._trainer_state(due))
                return ended_by
            before = self.batches.progress(self.at.cursor)
            with self.profile.step(self.at.step):
                record = self._step()
            stop_flag = self._polled
            self._log({**record, **self.measures.memory_fields(*self._memory)})
            due = self._due(before, stop_flag)
            if self._ended_by(stop_flag):
                self.saves.save(self.at, self._trainer_state(due))
            elif self._is_due(self.train.save_steps, self.train.save_epochs, before):
                self.saves.try_save(self.at, self._trainer_state(due))
            self._collect_garbage()

    def _sanity_check_eval(self, due: set[Duty], stop_flag: int) -> None:
        """Sanity-check evaluation before the first step of this start."""
        batches = self.train.eval_sanity_batches
        if not (self.held_out and batches) or "evaluation" in due:
            return
        if stop_flag != STOP and not self._ended_by(stop_flag):
            self.held_out.sanity_check(batches, lambda: self.stop)

    def _step(self) -> dict[str, Any]:
        started = time.perf_counter()
        step = self.at.step
        lr = lr_at(step, self.total_steps, self.train)
        self.ranks.heartbeat.set_phase("reading rows", step=step)
        if self._loader is None:
            self._loader = Loader(self.rows, self._steps(), self.reading)
        batches, rows = self._batches or next(self._loader), self.batches.rows(self.at.cursor)
        references: Sequence[torch.Tensor] = ()
        if self.references:
            self.references.on_step_start(step, self.at.cursor)
            references = self.references.lookup(batches)
        result: StepResult = self.built.engine.step(
            batches,
            lr,
            step,
            references,
            counts=self._counts,
            prefetch=self._prefetch,
            measures_changes=self._rounds_to_nearest and step == self._warmup_steps,
        )
        self._counts = result.next_counts
        # Polled while the device computes, and read with the step's loss in one copy to the host.
        self._polled, *self._memory = result.maxima
        self._evaluated = None
        self.at = TrainerState(
            self.batches.advance(self.at.cursor),
            step + 1,
            self.at.tokens + result.tokens,
            self.at.trained_tokens + result.trained_tokens,
            self.at.loss if result.loss is None else result.loss,
            self.at.rows + len(rows),
        )
        if result.changed_weights is not None and result.changed_weights < FEW_CHANGED:
            self._warn(rounding_warning(self.train, lr, result.changed_weights))
        seconds = time.perf_counter() - started
        return {
            "step": self.at.step,
            "epoch": round(float(self.batches.progress(self.at.cursor)), 4),
            "loss": result.loss,
            "lr": lr,
            **({"grad_norm": result.grad_norm} if self.train.log_grad_norm else {}),
            "tokens": result.tokens,
            "trained_tokens": result.trained_tokens,
            "tokens_per_second": round(result.tokens / seconds, 1),
            "seconds": round(seconds, 5),
            **result.metrics,
            **self.measures.step_fields(result, batches, rows, seconds),
        }

    def _prefetch(self) -> Prefetch:
        """Read the next step's rows, and poll the stop flag, while the device computes."""
        self._batches = []
        if self.at.step + 1 < self.total_steps:
            assert self._loader
            self._batches = next(self._loader)
        measures = self.measures
        memory = measures.peak_memory(), measures.reserved_memory()
        return Prefetch(self._batches, (self._stop_flag(), *memory))

    def _steps(self) -> Iterator[Groups]:
        """This rank's rows of every step from here to the end."""
        cursor = self.at.cursor
        for _ in range(self.at.step, self.total_steps):
            rows = self.batches.rows(cursor)
            costs, size = self._work[rows].tolist(), self.train.rows_at_once
            yield local_micro_batches(
                self.built, rows.tolist(), costs, size=size, count=self.accumulation
            )
            cursor = self.batches.advance(cursor)

    def _stop_flag(self) -> int:
        return STOP if self.stop else TIME_IS_UP if self.clock.is_up else GO_ON

    def _ended_by(self, stop_flag: int) -> str | None:
        """The setting that ends the run here; None: it continues."""
        if self.judge.should_stop:
            return "early_stopping"
        if self.at.step >= self.total_steps:
            return self.budget.set_by
        return "max_hours" if stop_flag == TIME_IS_UP else None

    def _is_due(self, steps: int, epochs: float, before: Fraction) -> bool:
        """Whether what comes every `steps` steps and every `epochs` epochs (0: never) is due after
        a step that began at epoch progress `before`."""
        if steps and self.at.step % steps == 0:
            return True
        if not epochs:
            return False
        # Through the text: the float 0.1 is not a tenth, and boundaries would drift.
        interval = Fraction(str(epochs))
        return self.batches.progress(self.at.cursor) // interval > before // interval

    def _due(self, before: Fraction, stop_flag: int) -> set[Duty]:
        """The evaluations and sample prompts due after this step."""
        train, due = self.train, set[Duty]()
        ends = self._ended_by(stop_flag) is not None
        is_due = self._is_due(train.eval_steps, train.eval_epochs, before)
        if self.held_out and (is_due or (ends and train.eval_at_end)):
            due.add("evaluation")
        if self.sampler and (ends or self._is_due(train.sample_steps, 0, before)):
            due.add("samples")
        return due

    def _run_due_evals(self, due: set[Duty], stop_flag: int) -> bool:
        """Run what is due and remove it from `due`. False if asked to stop before it is
        complete."""
        if "evaluation" in due and self.held_out:
            metrics = self._is_logged_already(METRICS, LOSS)
            if metrics is None:
                metrics = self.held_out.evaluate(lambda: self.stop)
                if metrics is None:
                    return False
                self._log({"step": self.at.step, **metrics})
            due.discard("evaluation")
            self._on_eval_end(metrics, due)
        if self.sampler and ("samples" in due or (self.at.step and self._ended_by(stop_flag))):
            if self._is_logged_already(SAMPLES, "samples") is None:
                answers = self.sampler.generate(lambda: self.stop)
                if answers is None:
                    return False
                if self._samples:
                    self._samples.append({"step": self.at.step, "samples": answers})
            due.discard("samples")
        return True

    def _on_eval_end(self, metrics: dict[str, Any], due: set[Duty]) -> None:
        """Best checkpoint and early stopping after an evaluation, unless nothing has been trained
        yet."""
        self._evaluated = metrics
        if self.at.step == self._untrained:
            return
        self.judge.update(metrics)
        if self.judge.is_best(metrics):
            before, self.judge.best = self.judge.best, {"step": self.at.step, **metrics}
            if not self.saves.save_best(self.at, self._trainer_state(due)):
                self.judge.best = before

    def _is_logged_already(self, file: str, name: str) -> dict[str, Any] | None:
        """The record of the start step with a value `name` that an earlier start has logged,
        without its step and time; the same on all ranks."""
        if self.at.step != self._started_at:
            return None
        logged = None
        if self.ranks.is_main_process:
            records = read_metrics(self.job.output_dir / file)
            logged_here = (r for r in records if r["step"] == self.at.step and name in r)
            logged = next(logged_here, None)
        record = self.ranks.all_gather(logged)[0]
        return record and {n: value for n, value in record.items() if n not in ("step", "time")}

    def _trainer_state(self, owes: set[Duty]) -> dict[str, Any]:
        """Trainer state in a checkpoint besides the step counters."""
        # Save elapsed time only with max_hours; otherwise checkpoints would differ between
        # identical runs.
        timed = {"seconds": self.clock.seconds} if self.train.max_hours else {}
        return {"owes": sorted(owes), **self.judge.state_dict(), **timed}

    def _resume(self) -> set[Duty]:
        """Resume from the newest checkpoint of this run, else load the configured one, else start
        from the initial weights; returns what is due before the next step."""
        folder, named = self.saves.newest(), self.train.load_checkpoint_path
        rng.start(self.train.seed, self.ranks.rank)
        due: set[Duty] = set()
        if folder:
            state = self._load(folder)
            with understanding(folder):
                self._untrained, due = None, set(state["owes"])
                self.judge.load_state_dict(state)
            self.measures.on_resume()
            if self.judge.best:
                self.saves.keep_best(self.judge.best["step"])
            self.clock.resume_from(state.get("seconds", 0.0))
        elif named not in (None, "auto"):
            self._load(Path(named))
            self._untrained = self.at.step
            if self.at.step >= self.total_steps and not self.train.eval_only:
                raise ConfigError(
                    f"train.load_checkpoint_path {named} has taken {self.at.step} steps, and this "
                    f"run ends at {self.total_steps}.\n  Raise train.{self.budget.set_by}."
                )
        elif self.job.init_checkpoint:
            self.saves.load_weights(self.job.init_checkpoint)
        self._started_at = self.at.step
        evaluates = self.held_out and (self.train.eval_at_start or self.train.eval_only)
        if evaluates and self.at.step == self._untrained:
            due.add("evaluation")
        return due

    def _load(self, folder: Path) -> dict[str, Any]:
        state = self.saves.load(folder)
        with understanding(folder):
            self.at = TrainerState.of_json(state)
            # A position in the rows of another run means nothing in these.
            same_rows = state["packed_key"] == self.job.packed_key
            cursor = self.at.cursor
            self.at.cursor = self.batches.clamp(cursor) if same_rows else self.batches.start()
        self.budget = build_duration(self.train, self.batches, self.rows.lengths(), self.at)
        return state

    def _open(self) -> None:
        if not self.ranks.is_main_process:
            return
        findings_shown = self._findings()
        write_environment(
            self.job, self.built, self.ranks, total_steps=self.total_steps, findings=findings_shown
        )
        self._recorder = MetricsRecorder(self.job, done=self.at.step, total=self.total_steps)
        for finding in findings_shown:
            self._recorder.log_message(f"warning: {finding.text}")
        if self.sampler:
            self._samples = MetricsLog(self.job.output_dir / SAMPLES, self.at.step)
        for text in self._early_warnings:
            self._recorder.warn(self.at.step, text)

    def _findings(self) -> list[Finding]:
        """Warnings about data, row and batch sizes; empty if the run folder has no data facts."""
        facts = read_data_facts(self.job.output_dir)
        if facts is None:
            return []
        return findings(
            run_size(
                self.job.config,
                packed=facts["packed"],
                prepared=facts["prepared"],
                steps=self.total_steps,
                set_by=self.budget.set_by,
                rows_per_step=self.batches.rows_per_step,
            )
        )

    def _log(self, record: dict[str, Any]) -> None:
        if self._recorder:
            self._recorder.log(record)

    def _warn(self, text: str, **details: Any) -> None:
        if self._recorder:
            self._recorder.warn(self.at.step, text, **details)
        elif self.ranks.is_main_process:
            self._early_warnings.append(text)

    def _collect_garbage(self) -> None:
        step, train = self.at.step, self.train
        if train.gc_steps and step % train.gc_steps == 0:
            gc.collect()
        if train.empty_cache_steps and step % train.empty_cache_steps == 0:
            empty_cache()

    def _facts(self, ended_by: str) -> dict[str, Any]:
        """The facts of a finished run. With `train.save_best` its result is the best checkpoint,
        with the evaluation of that checkpoint."""
        state, best = self.at, self.judge.best
        facts: dict[str, Any] = {
            "steps": state.step,
            "ended_by": ended_by,
            "epochs": round(float(self.batches.passes(state.cursor)), 4),
            "rows": len(self.rows),
            "rows_per_step": self.batches.rows_per_step,
            "tokens": state.tokens,
            "trained_tokens": state.trained_tokens,
            "final_loss": state.loss,
        }
        if warnings := self._findings():
            facts["warnings"] = [finding.as_json() for finding in warnings]
        if not self.train.eval_only:
            last = self.saves.path_of(state.step)
            facts["checkpoint"] = self.saves.path_of(best["step"]) if best else last
            if best:
                facts |= {"best_step": best["step"], "last_checkpoint": last}
        if self.built.quantized:
            facts["quantised"] = list(self.built.quantized)
        evaluated = best or self._evaluated or {}
        return facts | {name: value for name, value in evaluated.items() if name != "step"}
