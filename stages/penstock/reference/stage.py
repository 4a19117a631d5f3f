"""The reference stage: log-probs of all completions under the initial model (reference model)."""

import shutil
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from penstock.config.schema.run import RunConfig
from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import (
    Artifact,
    Facts,
    Input,
    Source,
    Stage,
    identity,
    stage_key,
)
from penstock.core.errors import ConfigError, Interrupted
from penstock.core.sources.hub import local_folder
from penstock.engine.model_source import ModelSource
from penstock.reference.settings import ReferenceSettings, reference_run
from penstock.train.launch.job import LOGS, Job, build_job
from penstock.train.launch.rank_failures import build_error
from penstock.train.launch.torchrun import LaunchResult, read_launch_outcome, start_ranks

SCORES = "scores"
"""Folder of log-probs shared by all runs, beside `reference`; one subfolder per model."""

MODULE = "penstock.reference"


@dataclass(frozen=True)
class Reference(Stage):
    """Input: packed rows. Output: log-probs of completions (`scores-*.arrow`), by sample content.

    They are computed once per model and sample, independent of packing and of the loss, and shared
    by all runs: existing log-probs are not recomputed.
    """

    name: ClassVar[str] = "reference"
    version: ClassVar[int] = 1
    neutral: ClassVar[Mapping[str, Any]] = {
        "adapter": None,
        "encode_dtype": None,
        "layer_versions": {},
    }
    module: ClassVar[str] = MODULE
    verifies_sources: ClassVar[bool] = True

    settings: ReferenceSettings  # pyright: ignore[reportIncompatibleVariableOverride]
    packed: Artifact
    origin: ModelSource  # The model; its config and weights are part of the cache key
    run_config: RunConfig
    root: Path  # Local folder with the shared log-probs in its subfolder `scores`
    ranks: Literal["torchrun", "this_process"] = "torchrun"
    initial: Source | None = None
    """A checkpoint whose weights, or adapter, replace the model's (`init_checkpoint_path`)."""

    @property
    def model(self) -> Mapping[str, Input]:
        """Inputs that determine log-probs, besides the samples."""
        inputs: dict[str, Input] = {"config": self.origin.config}
        if self.origin.weights:
            inputs["weights"] = self.origin.weights
        if self.origin.adapter:
            inputs["adapter"] = self.origin.adapter
        if self.initial:
            inputs["initial"] = self.initial
        return inputs

    @property
    def inputs(self) -> Mapping[str, Input]:
        return {"packed": self.packed, **self.model}

    @property
    def shared_folder(self) -> Path:
        model = {name: source.key for name, source in self.model.items()}
        shared_identity = {"version": self.version, "settings": identity(self)["settings"]}
        return self.root / SCORES / digest_json({**shared_identity, **model})[:16]

    def run(self, out: Path) -> Facts:
        """Compute missing log-probs, and write those of all samples to `out`. Raises Interrupted if
        asked to stop; what has been computed so far is saved."""
        from penstock.reference.samples import sample_digests
        from penstock.rows.ref_logprobs import RefLogprobs, drop_damaged, write_scores

        for file in drop_damaged(self.shared_folder):
            sys.stderr.write(f"reference: {file} is damaged; its log-probs are computed again\n")
        samples = sample_digests(self.packed.path)
        # The other ranks of a user's torchrun (`follow`) wait for this one, even if none is
        # missing.
        if self.ranks == "this_process" or RefLogprobs(self.shared_folder).missing(samples):
            job = self.job(out.resolve())
            file = job.write()
            # Those of an earlier attempt would be taken for the causes of this one's failure.
            shutil.rmtree(out / LOGS, ignore_errors=True)
            (out / LOGS).mkdir(parents=True)
            ended = (
                start_ranks(job, file, module=MODULE)
                if self.ranks == "torchrun"
                else _run_in_this_process(job)
            )
            self.read_facts(job, ended, str(out))
        scores = RefLogprobs(self.shared_folder).get(samples)
        write_scores(out, samples, scores)
        return {"samples": len(samples), "mean_log_probs": scores.mean(0).round(6).tolist()}

    def job(self, output_dir: Path) -> Job:
        run = reference_run(self.run_config, has_adapter=self.settings.adapter is not None)
        typed, initial = self.run_config.train.init_checkpoint_path, None
        if self.initial and typed:
            initial = local_folder(typed, self.initial).resolve()
        job = build_job(stage_key(self), run, self.packed, self.origin, output_dir, self.initial)
        return replace(job, ref_logprobs=self.shared_folder.resolve(), init_checkpoint=initial)

    def read_facts(self, job: Job, ended: LaunchResult, location: str) -> dict[str, Any]:
        """Facts returned by finished ranks. Raises Interrupted if they were asked to stop, and
        StageError with the cause if they failed."""
        outcome = read_launch_outcome(job)
        if outcome is None:
            raise build_error(job.output_dir / LOGS, ended.exit_status, ended.hang_report)
        if outcome["facts"] is None:
            raise Interrupted(
                f"reference was asked to stop; log-probs so far are in {self.shared_folder}.\n"
                f"  Run the same command again to resume, in {location}.",
                signum=outcome["signal"] or signal.SIGTERM,
            )
        return outcome["facts"]

    def follow(self, out: Path) -> None:
        """Run as a rank other than 0 in this process; rank 0 runs the stage."""
        _run_in_this_process(self.job(out.resolve()))

    def owned_files(self, out: Path) -> Iterable[Path]:
        # The other files of the ranks are temporary.
        return sorted(out.glob("scores-*.arrow"))


def no_reference(run: RunConfig) -> ConfigError:
    """Error for a run without a reference stage."""
    if run.train.objective != "preference":
        why = f"train.objective is {run.train.objective}, which uses no reference model"
    elif run.preference.reference_free:
        why = "preference.reference_free is true"
    else:
        why = f"preference.loss_type {run.preference.loss_type} uses no reference model"
    return ConfigError(f"this run has no reference stage: {why}.\n  Train without it.")


def _run_in_this_process(job: Job) -> LaunchResult:
    """Run rank 0 in this process: the user started all ranks with torchrun."""
    from penstock.reference.rank import reference
    from penstock.train.rank import run_by_hand

    run_by_hand(job, reference)
    return LaunchResult(exit_status=0)
