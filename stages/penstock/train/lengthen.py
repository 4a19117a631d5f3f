"""Lengthening: going on in the output folder of a shorter run.

The length of a run is part of its key, because learning rate schedules depend on it. A longer run
goes on from the newest checkpoint of a shorter one if all steps until there would have been the
same: only the length and the schedule differ, and each of these steps had the learning rate of the
longer run. The result then has the bytes of a run that had the new length from its start.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config.schema.train import TrainConfig
from penstock.core.cache.diff_identity import Difference, differences
from penstock.core.cache.input_digests import changed_inputs, digests_of_inputs, recorded_identity
from penstock.core.cache.stage import identity
from penstock.core.cache.store import PlannedStage
from penstock.engine.checkpoint.folders import (
    checkpoint_step,
    complete_checkpoints,
    newest_checkpoint,
    read_state,
)
from penstock.optim.schedule import depends_on_length, lr_at
from penstock.rows.batches import StepSampler
from penstock.train.launch.job import CHECKPOINTS, read_earlier_keys
from penstock.train.stage import Train

LENGTH = frozenset({"max_hours", "max_steps", "max_tokens", "num_train_epochs"})

SCHEDULE = frozenset(
    {
        *("lr_decay_ratio", "lr_decay_style", "lr_min", "lr_schedule_kwargs"),
        *("lr_start", "lr_warmup_ratio", "lr_warmup_steps"),
    }
)
"""Settings that only `optim.schedule.lr_at` reads."""

INEXACT = {
    "lacks_optimizer": "save_optimizer: false",
    "rounds_weights": "ckpt_weights: compute",
    "compresses_states": "ckpt_quant",
}
"""What a checkpoint's `state.json` says of state that it does not hold in full, and the setting."""


def is_lengthening(changed: Sequence[Difference]) -> bool:
    """Whether two runs differ in length or schedule, and at most in their packed rows besides."""
    names = {
        difference.field.removeprefix("settings.train.").partition(".")[0]
        for difference in changed
        if difference.field != "inputs.packed"
    }
    return bool(names) and names <= LENGTH | SCHEDULE


def find_shorter(step: PlannedStage, record: Mapping[str, Any]) -> "ShorterRun | None":
    """The run with this manifest or attempt record in the step's folder, if it differs from the
    step in length or schedule."""
    stage = step.stage
    if not isinstance(stage, Train):
        return None
    changed = differences(identity(stage), recorded_identity(record))
    return ShorterRun(step, record, stage) if is_lengthening(changed) else None


@dataclass(frozen=True)
class ShorterRun:
    """The run in an output folder, finished or not, and the one that is to go on from it."""

    step: PlannedStage
    record: Mapping[str, Any]
    """Its manifest, or the record of its attempt."""
    longer: Train

    @property
    def newest(self) -> Path | None:
        """Its newest complete checkpoint."""
        key = self.record["key"]
        keys = (key, *read_earlier_keys(self.step.path, key))
        return newest_checkpoint(self._checkpoints, keys)

    @property
    def _checkpoints(self) -> Path:
        return self.step.path / CHECKPOINTS

    def refusal(self) -> str | None:
        """Why the longer run cannot go on from it, and what to write instead; None if it can."""
        return next(self._refusals(), None)

    def _refusals(self) -> Iterator[str]:
        if self.step.remote:
            yield (
                "its folder is at a URL.\n  Write another train.output_dir, and its newest "
                "checkpoint in train.load_checkpoint_path."
            )
        yield from self._other_rows()
        facts: Mapping[str, Any] = self.record.get("facts", {})
        newest = self.newest
        if newest is None or checkpoint_step(newest) < facts.get("steps", 0):
            yield self._lacks_checkpoint(newest, facts)
            return
        done = checkpoint_step(newest)
        state = read_state(newest)
        for name, field in INEXACT.items():
            if state.get(name):
                yield (
                    f"{newest} lacks state that a run of the new length has there (train.{field})."
                    f"\n  Write another train.output_dir and train.load_checkpoint_path: {newest} "
                    "to go on from what it holds."
                )
        before, after = self.record["settings"], identity(self.longer)["settings"]
        yield from self._other_end(done, facts.get("ended_by"), before, after)
        yield from self._other_rates(newest, before, after)

    def _other_rows(self) -> Iterator[str]:
        packed, run = self.longer.packed, self.longer.run_config
        if recorded_identity(self.record)["inputs"]["packed"] != packed.key:
            why = "its packed rows are others"
            if run.data.mix_strategy == "random":
                why += (
                    ": data.mix_strategy random draws the data of all train.num_train_epochs "
                    "together; train.max_steps changes no data"
                )
            yield f"{why}."
        digests = digests_of_inputs(self.longer)
        for changed in changed_inputs(self.longer, self.record, digests):
            yield f"{changed}."

    def _lacks_checkpoint(self, newest: Path | None, facts: Mapping[str, Any]) -> str:
        end = f" of step {facts['steps']}" if "steps" in facts else ""
        newest_name = f"the newest is {newest.name}" if newest else "there is none"
        return (
            f"that needs its checkpoint{end} in {self._checkpoints}, where {newest_name}.\n"
            "  Restore it from a copy. From exported weights alone a new run starts: write "
            "train.init_checkpoint_path and another train.output_dir."
        )

    def _other_end(
        self, done: int, ended_by: str | None, before: Mapping[str, Any], after: Mapping[str, Any]
    ) -> Iterator[str]:
        hours = _schedule(before).max_hours, _schedule(after).max_hours
        if ended_by == "early_stopping":
            yield (
                f"train.early_stopping ended it after step {done} and would again.\n"
                "  Raise train.early_stopping.patience, with another train.output_dir."
            )
        if ended_by == "max_hours" and hours[0] and hours[1] and hours[1] <= hours[0]:
            yield f"train.max_hours ended it after step {done}.\n  Raise train.max_hours."
        steps = self._steps(after)
        if steps is not None and steps <= done:
            yield f"it has taken {done} steps, and the new settings end after {steps}."
        is_at_end = ended_by is not None or self._steps(before) == done
        if after.get("judging") and is_at_end and not self._evaluates_after(done, ended_by, before):
            yield (
                f"it was evaluated after step {done} because it ended there (train.eval_at_end), a "
                "longer run is not, and evaluations decide its result (train.save_best, "
                "train.early_stopping)."
            )

    def _evaluates_after(self, done: int, ended_by: str | None, before: Mapping[str, Any]) -> bool:
        """Whether also a run that goes on is evaluated after the step."""
        train = self.longer.run_config.train
        by_steps = train.eval_steps and done % train.eval_steps == 0
        epochs = Fraction(str(_schedule(before).num_train_epochs))
        by_epochs = (
            train.eval_epochs
            and ended_by == "num_train_epochs"
            and epochs % Fraction(str(train.eval_epochs)) == 0
        )
        return bool(by_steps or by_epochs or not train.eval_at_end)

    def _other_rates(
        self, newest: Path, before: Mapping[str, Any], after: Mapping[str, Any]
    ) -> Iterator[str]:
        was, will = _schedule(before), _schedule(after)
        totals = self._steps(before), self._steps(after)
        done = checkpoint_step(newest)
        if None in totals and (depends_on_length(was) or depends_on_length(will)):
            why = "train.max_tokens decides how many steps that is"
            yield self._other_schedule(newest, will, why, same=0)
        for step in range(done):
            old, new = lr_at(step, totals[0] or done, was), lr_at(step, totals[1] or done, will)
            if old != new:
                why = f"step {step + 1} had {old:.6g} and would have {new:.6g}"
                yield self._other_schedule(newest, will, why, same=step)

    def _other_schedule(self, newest: Path, will: TrainConfig, why: str, *, same: int) -> str:
        folders = complete_checkpoints(self._checkpoints)
        common = [folder for folder in folders if checkpoint_step(folder) <= same]
        if common:
            load, until = common[-1], f"until which both agree (up to step {same} they do)"
        else:
            load, until = newest, "after which the learning rate follows the new schedule"
        return (
            f"the learning rate (train.lr_decay_style: {will.lr_decay_style}) follows the length of"
            f" the run: {why}.\n  Write another train.output_dir and train.load_checkpoint_path: "
            f"{load}, {until}. Runs with lr_decay_style: constant can be lengthened."
        )

    def _steps(self, settings: Mapping[str, Any]) -> int | None:
        """The number of steps of a run; None if tokens decide it."""
        train = _schedule(settings)
        if train.max_tokens is not None:
            return None
        if train.max_steps is not None:
            return train.max_steps
        facts = self.longer.packed.facts
        batches = StepSampler(
            np.ones(facts["rows"]["train"], dtype=np.int64),
            rows_per_step=settings["rows_per_step"],
            seed=settings["train"]["seed"],
            last_batch=settings["last_batch"],
            epoch_rows=facts.get("epoch_rows", {}).get("train", ()),
        )
        return batches.steps_until(Fraction(str(train.num_train_epochs)), batches.start())


def _schedule(settings: Mapping[str, Any]) -> TrainConfig:
    """Length and schedule of the run with these settings in its identity."""
    names = LENGTH | SCHEDULE | {"lr"}
    written = {name: value for name, value in settings["train"].items() if name in names}
    return TrainConfig.model_validate({"output_dir": ".", **written})
