"""The train stage: cache key, run folder, and launch of the ranks."""

import contextlib
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar, Literal

from pydantic import Field

from penstock.config.schema.base import Settings
from penstock.config.schema.cache_key import key_defaults
from penstock.config.schema.data import LastBatch
from penstock.config.schema.lora import LoraConfig
from penstock.config.schema.model import ModelConfig
from penstock.config.schema.run import RunConfig
from penstock.config.schema.train import TrainConfig
from penstock.core.cache.data_facts import DATA, write_data_facts
from penstock.core.cache.stage import Artifact, Facts, Input, Source, Stage, stage_key
from penstock.core.errors import ArtifactError, PenstockError
from penstock.core.files import regular_files
from penstock.core.os_errors import describe_os_error
from penstock.core.remote.urls import is_url, redact
from penstock.core.sources.hub import local_folder
from penstock.engine.checkpoint.folders import checkpoint_naming, newest_checkpoint
from penstock.engine.model_source import ExportFormat, ModelSource
from penstock.train.launch.job import (
    CHECKPOINTS,
    HF_WEIGHTS,
    LOGS,
    Job,
    build_job,
    read_outcome,
    resolve_source,
)
from penstock.train.launch.leaner_starts import start_leaner_ranks
from penstock.train.launch.stop_request import STOP_FILE
from penstock.train.launch.torchrun import LaunchResult, build_facts
from penstock.train.launch.upload_selection import files_to_download, files_to_upload


class TrainSettings(Settings):
    """All user settings that change the trained weights."""

    model: dict[str, Any]
    train: dict[str, Any]
    lora: dict[str, Any] = Field(default_factory=dict)
    rows_per_step: int
    """Global batch size in packed rows."""
    last_batch: LastBatch
    isolate_samples: bool = True
    """Document masking: whether samples of one row do not attend to each other."""
    judging: dict[str, Any] | None = None
    """Early stopping and best-checkpoint settings, which depend on evaluations."""
    preference: dict[str, Any] | None = None
    """The preference loss settings, if any."""
    layer_versions: dict[str, Any] = Field(default_factory=dict)
    """Those of the model's layers, where they have any (`identity.LAYER_VERSIONS`), or the package
    of its family."""
    parts: dict[str, Any] = Field(default_factory=dict)
    """The loss and the optimizer, if they are of packages (`identity.part_identity`)."""


@dataclass(frozen=True)
class Train(Stage):
    """Trains on packed rows and writes checkpoints. The parallel layout is not part of the
    identity."""

    name: ClassVar[str] = "train"
    module: ClassVar[str] = "penstock.train"
    version: ClassVar[int] = 2
    verifies_sources: ClassVar[bool] = True
    neutral: ClassVar[Mapping[str, Any]] = {
        **dict(key_defaults(ModelConfig, "model")),
        **dict(key_defaults(TrainConfig, "train")),
        **dict(key_defaults(LoraConfig, "lora")),
        "judging": None,
        "isolate_samples": True,
        "preference": None,
        "layer_versions": {},
        "parts": {},
    }

    settings: TrainSettings
    packed: Artifact
    origin: ModelSource
    """Its config and weights are part of the identity; the tokenizer is copied to the HF
    weights."""
    checkpoint: Source | None
    run_config: RunConfig
    ranks: Literal["torchrun", "this_process"] = "torchrun"
    prepared: Artifact | None = None
    """Not part of the identity: the prepared samples, which only the report describes."""
    initial: Source | None = None
    """A checkpoint whose weights are loaded at the start, without optimizer state."""
    reference: Artifact | None = None
    """Reference log-probs of the completions, if the loss needs them."""
    leaner: tuple[Mapping[str, Any], ...] = ()
    """Not part of the identity: settings of `train` to go on with if memory runs out, in order."""

    @property
    def inputs(self) -> Mapping[str, Input]:
        """The packed rows, the model's config and weights, and what else training starts from."""
        optional: dict[str, Input | None] = {
            "weights": self.origin.weights,
            "adapter": self.origin.adapter,
            "checkpoint": self.checkpoint,
            "initial": self.initial,
            "reference": self.reference,
        }
        present = {name: source for name, source in optional.items() if source}
        return {"packed": self.packed, "config": self.origin.config, **present}

    def read_facts(self, job: Job, ended: LaunchResult, location: str) -> dict[str, Any]:
        """The facts of ranks that finished; otherwise raises the error that ended them."""
        return build_facts(job, ended, location)

    def run(self, out: Path) -> Facts:
        """Train from the newest checkpoint in `out`. Raises Interrupted if asked to stop."""
        job = self.job(out.resolve())
        require_checkpoint(job)
        file = job.write()
        # It belongs to the previous start.
        (out / STOP_FILE).unlink(missing_ok=True)
        write_data_facts(out, self.packed, self.prepared)
        _keep_shown_data(out, self)
        # Failures and crashes of an earlier start would be taken for the cause of this one's.
        shutil.rmtree(out / LOGS, ignore_errors=True)
        (out / LOGS).mkdir(parents=True, exist_ok=True)
        saves_hf = self.run_config.train.save_hf_weights
        if saves_hf and self.ranks == "torchrun":
            # torch is imported while the ranks import it too, and not after they have ended.
            Thread(target=_import_export, name="import-export").start()
        if self.ranks == "torchrun":
            job, ended = start_leaner_ranks(job, file, self.leaner)
        else:
            ended = _here(job)
        # Before `read_facts`, which raises for a run that failed or stopped: it has a report too.
        _report(out)
        facts = self.read_facts(job, ended, self._where(out))
        if saves_hf and "checkpoint" in facts:
            self._write_hf_weights(out / facts["checkpoint"])
        return facts

    def files_to_upload(self, out: Path) -> list[list[Path]]:
        return files_to_upload(out)

    def files_to_download(self, names: Collection[str], out: Path) -> list[str]:
        return files_to_download(names, out, checkpoint_naming(self.run_config.train))

    def _config_here(self) -> RunConfig:
        """The config for the ranks, with a remote checkpoint replaced by its local copy."""
        path, run = self.run_config.train.load_checkpoint_path, self.run_config
        if not self.checkpoint or not path or not is_url(path):
            return run
        local_path = str(local_folder(path, self.checkpoint))
        return run.with_fields("train", load_checkpoint_path=local_path)

    def _where(self, out: Path) -> str:
        output_dir = self.run_config.train.output_dir
        return redact(output_dir) if is_url(output_dir) else str(out)

    def _write_hf_weights(self, checkpoint: Path) -> None:
        """Save the model with the last checkpoint in Hugging Face or PEFT format
        (save_pretrained)."""
        from penstock.engine.hf.export import write_folders

        form = ExportFormat(merged=not self.run_config.lora.save_lora_only)
        write_folders(checkpoint, self.origin, form, checkpoint / HF_WEIGHTS)

    def follow(self, out: Path) -> None:
        """Run as a rank other than rank 0, in this process; rank 0 runs the stage."""
        _here(self.job(out.resolve()))

    def job(self, output_dir: Path) -> Job:
        """The job of this machine's ranks."""
        initial = resolve_source(self.run_config.train.init_checkpoint_path, self.initial)
        ref_logprobs = self.reference.path.resolve() if self.reference else None
        run, checkpoints = self._config_here(), (self.checkpoint, self.initial)
        job = build_job(stage_key(self), run, self.packed, self.origin, output_dir, *checkpoints)
        return replace(job, init_checkpoint=initial, ref_logprobs=ref_logprobs)

    def owned_files(self, out: Path) -> Iterable[Path]:
        """The resulting checkpoint and the data provenance, which other stages read. Logs, metrics
        and other checkpoints may change."""
        outcome = read_outcome(out)
        assert outcome, "run has found one"
        facts = outcome["facts"]
        if "checkpoint" not in facts:
            return [out / DATA]
        checkpoint = out / facts["checkpoint"]
        # Hugging Face weights are optional and not part of the identity, so they are not verified.
        files = regular_files(checkpoint)
        own = [path for path in files if (checkpoint / HF_WEIGHTS) not in path.parents]
        return [*own, out / DATA]


def require_checkpoint(job: Job) -> None:
    """Raise ArtifactError if a checkpoint to resume from is required and there is none."""
    root = job.output_dir / CHECKPOINTS
    if job.config.train.require_checkpoint and newest_checkpoint(root, job.keys) is None:
        raise ArtifactError(
            f"train.require_checkpoint is true, and {root} holds no complete checkpoint of this "
            "run.\n  Write train.output_dir as it was, or leave require_checkpoint out to start "
            "fresh."
        )


def _here(job: Job) -> LaunchResult:
    """Run as rank 0 in this process; torchrun was started by the user and runs the other ranks."""
    from penstock.train.rank import run_by_hand

    run_by_hand(job)
    return LaunchResult(exit_status=0)


def _keep_shown_data(out: Path, stage: Train) -> None:
    """Store the data samples of the report; errors do not stop the run."""
    from penstock.rows.decoding import load_pinned_decoder
    from penstock.train.data_samples import keep_shown_data

    try:
        keep_shown_data(
            out,
            stage.packed.path,
            stage.packed.facts.get("epoch_rows", {}).get("train", ()),
            stage.run_config.train.report_samples,
            lambda: load_pinned_decoder(stage.origin.tokenizer_path, stage.origin.tokenizer),
        )
    except (OSError, PenstockError) as error:
        sys.stderr.write(f"train: the report shows no samples of the data: {error}\n")


def _import_export() -> None:
    # A thread would print its traceback; the import in `_write_hf_weights` raises.
    with contextlib.suppress(Exception):
        import_module("penstock.engine.hf.export")


def _report(out: Path) -> None:
    """Write report.html; errors do not stop the run."""
    from penstock.train.report import write_report

    try:
        write_report(out)
    except OSError as error:
        sys.stderr.write(f"train: no report was written: {describe_os_error(error)}\n")
    except ArtifactError as error:
        sys.stderr.write(f"train: no report was written: {error}\n")
