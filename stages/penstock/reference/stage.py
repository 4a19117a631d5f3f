"""The reference stage: what the model that training starts from makes of every answer."""

import shutil
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from penstock.config.schema.run import RunConfig
from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import Artifact, Facts, Input, Source, Stage, stage_key
from penstock.core.errors import ConfigError, Interrupted
from penstock.core.sources.hub import local_folder
from penstock.engine.model_source import ModelSource
from penstock.reference.settings import ReferenceSettings, reference_run
from penstock.train.launch.job import LOGS, Job, build_job
from penstock.train.launch.rank_failures import what_happened
from penstock.train.launch.torchrun import LaunchResult, read_run_outcome, start_ranks

SCORES = "scores"
"""The folder beside `reference` in which scores of all runs lie, one folder for each model."""

MODULE = "penstock.reference"


@dataclass(frozen=True)
class Reference(Stage):
    """Packed answers in, their log-probabilities out: `scores-*.arrow`, by the samples' content.

    They are computed once for every model and sample, whatever rows the samples are packed in, and
    whatever is learnt from them: what is there already, of any run, is not computed again.
    """

    name: ClassVar[str] = "reference"
    version: ClassVar[int] = 1
    module: ClassVar[str] = MODULE

    settings: ReferenceSettings  # pyright: ignore[reportIncompatibleVariableOverride]
    packed: Artifact
    origin: ModelSource
    """Of which the config and the weights are identity."""
    run_config: RunConfig
    root: Path
    """The folder on this machine in whose `scores` those of all runs lie."""
    ranks: Literal["torchrun", "this_process"] = "torchrun"
    initial: Source | None = None
    """A checkpoint whose weights stand in for the model's."""

    @property
    def model(self) -> Mapping[str, Input]:
        """What the scores are of, besides the answers."""
        found: dict[str, Input] = {"config": self.origin.config}
        if self.origin.weights:
            found["weights"] = self.origin.weights
        if self.initial:
            found["initial"] = self.initial
        return found

    @property
    def inputs(self) -> Mapping[str, Input]:
        """The packed rows, the model's config and its weights."""
        return {"packed": self.packed, **self.model}

    @property
    def known(self) -> Path:
        """Where this model's scores lie, of the samples of all runs."""
        model = {name: source.key for name, source in self.model.items()}
        made = {"version": self.version, "settings": self.settings.model_dump(mode="json")}
        return self.root / SCORES / digest_json({**made, **model})[:16]

    def run(self, out: Path) -> Facts:
        """Compute what is not known, and put all that is asked for together.

        Raises Interrupted when asked to stop: what has been computed is known then.
        """
        from penstock.reference.samples import sample_digests
        from penstock.rows.ref_logprobs import AnswerScores, drop_damaged, write_scores

        for file in drop_damaged(self.known):
            sys.stderr.write(f"reference: {file} is damaged, and is computed again\n")
        samples = sample_digests(self.packed.path)
        if self.ranks == "this_process" or AnswerScores(self.known).missing(samples):
            job = self.job(out.resolve())
            file = job.write()
            shutil.rmtree(out / LOGS, ignore_errors=True)
            (out / LOGS).mkdir(parents=True)
            ended = (
                start_ranks(job, file, module=MODULE) if self.ranks == "torchrun" else _here(job)
            )
            self.ending(job, ended, str(out))
        scores = AnswerScores(self.known).of(samples)
        write_scores(out, samples, scores)
        return {"samples": len(samples), "mean_log_probs": scores.mean(0).round(6).tolist()}

    def job(self, output_dir: Path) -> Job:
        """What the ranks of this machine are told."""
        origin = replace(self.origin, adapter=None, adapter_path=None)
        run = reference_run(self.run_config)
        job = build_job(stage_key(self), run, self.packed, origin, output_dir)
        return replace(job, scores=self.known.resolve(), initial=self._initial())

    def _initial(self) -> Path | None:
        typed = self.run_config.train.init_checkpoint_path
        if not self.initial or not typed:
            return None
        return local_folder(typed, self.initial).resolve()

    def ending(self, job: Job, ended: LaunchResult, where: str) -> dict[str, Any]:
        """What ranks that came to their end have found. Raises Interrupted if they were asked to
        stop, and StageError with the cause if they failed."""
        outcome = read_run_outcome(job)
        if outcome is None:
            raise what_happened(job.output_dir / LOGS, ended.status, ended.hung)
        if outcome["facts"] is None:
            raise Interrupted(
                f"reference was asked to stop, and keeps what it has computed in {self.known}.\n"
                f"  Run the same command again to go on from there, in {where}.",
                signum=outcome["signal"] or signal.SIGTERM,
            )
        return outcome["facts"]

    def follow(self, out: Path) -> None:
        """Be a rank that does not lead, in this process; the leading rank runs the stage."""
        _here(self.job(out.resolve()))

    def owned_files(self, out: Path) -> Iterable[Path]:
        """The scores; what ranks leave beside them comes and goes."""
        return sorted(out.glob("scores-*.arrow"))


def no_reference(run: RunConfig) -> ConfigError:
    """What is to be said of a run that is asked for its reference scores, and has none."""
    if run.train.objective != "preference":
        why = f"train.objective is {run.train.objective}, which compares with no reference model"
    elif run.preference.reference_free:
        why = "preference.reference_free is true"
    else:
        why = f"preference.loss_type {run.preference.loss_type} compares with no reference model"
    return ConfigError(f"this run has no reference stage: {why}.\n  Train it as it is.")


def _here(job: Job) -> LaunchResult:
    """Be the leading rank ourselves; torchrun was started by hand and the others are with us."""
    from penstock.reference.rank import reference
    from penstock.train.rank import run_by_hand

    run_by_hand(job, reference)
    return LaunchResult(status=0)
