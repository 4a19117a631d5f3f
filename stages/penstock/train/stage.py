"""The train stage: its identity, its folder, and torchrun."""

import shutil
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from penstock.config.schema.base import Settings
from penstock.config.schema.data import LastBatch
from penstock.config.schema.fp8 import Fp8Config
from penstock.config.schema.run import RunConfig
from penstock.core.cache.data_facts import DATA, keep_data_facts
from penstock.core.cache.diff_identity import differences
from penstock.core.cache.input_digests import read_attempt
from penstock.core.cache.manifest import MANIFEST, read_manifest
from penstock.core.cache.stage import (
    Artifact,
    Facts,
    Input,
    Source,
    Stage,
    identity,
    short,
    stage_key,
)
from penstock.core.cache.store import PlannedStage
from penstock.core.errors import ArtifactError, ConfigError, PenstockError
from penstock.core.files import backup_rename, regular_files
from penstock.core.os_errors import describe_os_error
from penstock.core.remote.urls import is_url, redact
from penstock.core.sources.hub import local_folder
from penstock.engine.checkpoint.folders import checkpoint_naming, newest_checkpoint
from penstock.engine.model_source import ExportFormat, ModelSource
from penstock.train.launch.job import CHECKPOINTS, HF_WEIGHTS, LOGS, Job, build_job, read_outcome
from penstock.train.launch.stop_request import STOP_FILE
from penstock.train.launch.torchrun import LaunchResult, build_ending, start_ranks
from penstock.train.launch.upload_selection import files_to_download, files_to_upload


class TrainSettings(Settings):
    """Every written thing that changes what is learnt."""

    model: dict[str, Any]
    train: dict[str, Any]
    lora: dict[str, Any] = Field(default_factory=dict)
    rows_per_step: int
    """Packed rows in one optimizer step over all ranks."""
    last_batch: LastBatch
    isolate_samples: bool = True
    """Whether samples of one row do not see each other."""
    judging: dict[str, Any] | None = None
    """What decides when a run ends, or which checkpoint is its result, by what is evaluated."""
    preference: dict[str, Any] | None = None
    """How preferences are learnt, where they are."""


@dataclass(frozen=True)
class Train(Stage):
    """Packed rows in, checkpoints out. How it is laid out over ranks is not identity."""

    name: ClassVar[str] = "train"
    module: ClassVar[str] = "penstock.train"
    version: ClassVar[int] = 2
    neutral: ClassVar[Mapping[str, Any]] = {
        "train.fsdp_reduce_dtype": "fp32",
        "model.router_fp32": True,
        "model.freeze_router": False,
        "model.lm_head_fp32": False,
        "model.attention_cast_bf16": False,
        "train.dropout.hidden": 0.0,
        "train.dropout.ffn": 0.0,
        "train.dropout.attention": 0.0,
        "train.dropout.warmup_steps": 0,
        "train.dropout.depth_scaling": False,
        "train.dropout": {},
        "train.enable_fp8_training": False,
        **{f"train.fp8.{name}": value for name, value in Fp8Config().model_dump().items()},
        "train.fp8": {},
        "train.optimizer_kwargs": {},
        "train.lr_warmup_steps": None,
        "train.save_optimizer": True,
        "train.load_optimizer": True,
        "train.ckpt_weights": "master",
        "train.ckpt_quant": "none",
        "train.lr_schedule_kwargs.warmup_style": "zero_start",
        "train.lr_schedule_kwargs.hold_steps": 0,
        "train.lr_schedule_kwargs.constant_steps": 0,
        "train.lr_schedule_kwargs.num_cycles": 0.5,
        "train.lr_schedule_kwargs.power": 1.0,
        "train.lr_schedule_kwargs.gamma": 0.1,
        "train.lr_schedule_kwargs.step_size": 1,
        "train.lr_schedule_kwargs.d_model": 1,
        "train.lr_schedule_kwargs.decay_rate": 0.5,
        "train.lr_schedule_kwargs.timescale": None,
        "train.lr_schedule_kwargs.decay_steps": None,
        "train.lr_schedule_kwargs.decay_shape": "linear",
        "train.lr_schedule_kwargs": {},
        "train.layerwise_lr_decay_bound": 1.0,
        "train.precision": None,
        "train.master_weights": None,
        "train.stochastic_rounding": False,
        "train.grad_accum_dtype": None,
        "train.loss_scale_init": 65536.0,
        "lora.use_rslora": False,
        "lora.use_dora": False,
        "lora.lora_plus_ratio": 1.0,
        "lora.lora_bias": "none",
        "lora.lora_dropout": 0.0,
        "train.moe_aux_loss_coef": None,
        "train.moe_global_load_balancing": False,
        "train.moe_z_loss_coef": 0.0,
        "train.moe_bias_update_rate": 0.0,
        "train.label_smoothing": 0.0,
        "train.z_loss_coef": 0.0,
        "lora.moe_shared_lora": False,
        "lora.moe_hybrid_shared_lora": False,
        "train.max_tokens": None,
        "train.max_hours": None,
        "train.eval_only": False,
        "judging": None,
        "isolate_samples": True,
        "preference": None,
    }

    settings: TrainSettings
    packed: Artifact
    origin: ModelSource
    """Of which the config and the weights are identity; the tokenizer goes beside HF weights."""
    checkpoint: Source | None
    run_config: RunConfig
    ranks: Literal["torchrun", "this_process"] = "torchrun"
    prepared: Artifact | None = None
    """How: the samples that were packed; only the report tells of them."""
    initial: Source | None = None
    """A checkpoint of whose weights alone the run starts."""
    reference: Artifact | None = None
    """What a reference model makes of the answers, where a loss compares with one."""

    @property
    def inputs(self) -> Mapping[str, Input]:
        """The packed rows, the model's config, its weights, and what else training starts from."""
        found: dict[str, Input] = {"packed": self.packed, "config": self.origin.config}
        if self.origin.weights:
            found["weights"] = self.origin.weights
        if self.origin.adapter:
            found["adapter"] = self.origin.adapter
        if self.checkpoint:
            found["checkpoint"] = self.checkpoint
        if self.initial:
            found["initial"] = self.initial
        if self.reference:
            found["reference"] = self.reference
        return found

    def ending(self, job: Job, ended: LaunchResult, where: str) -> dict[str, Any]:
        """The facts of ranks that came to their end; raises what ended them else."""
        return build_ending(job, ended, where)

    def run(self, out: Path) -> Facts:
        """Train from the newest checkpoint in `out`. Raises Interrupted when asked to stop."""
        job = self.job(out.resolve())
        require_checkpoint(job)
        file = job.write()
        # It was for the start before this one.
        (out / STOP_FILE).unlink(missing_ok=True)
        keep_data_facts(out, self.packed, self.prepared)
        _keep_shown_data(out, self)
        shutil.rmtree(out / LOGS, ignore_errors=True)
        (out / LOGS).mkdir(parents=True)
        ended = start_ranks(job, file) if self.ranks == "torchrun" else _here(job)
        _report(out)
        facts = self.ending(job, ended, self._where(out))
        if self.run_config.train.save_hf_weights and "checkpoint" in facts:
            self._write_hf_weights(out / facts["checkpoint"])
        return facts

    def keepsakes(self, out: Path) -> list[list[Path]]:
        """Complete checkpoints, and the run's record of itself."""
        return files_to_upload(out)

    def wanted(self, names: Collection[str], out: Path) -> list[str]:
        """The newest complete checkpoint, unless one as new is here."""
        return files_to_download(names, out, checkpoint_naming(self.run_config.train))

    def _config_here(self) -> RunConfig:
        """The config as ranks are to read it: a checkpoint behind a URL is on this machine."""
        typed, run = self.run_config.train.load_checkpoint_path, self.run_config
        if not self.checkpoint or not typed or not is_url(typed):
            return run
        here = {"load_checkpoint_path": str(local_folder(typed, self.checkpoint))}
        return run.model_copy(update={"train": run.train.model_copy(update=here)})

    def _where(self, out: Path) -> str:
        """Where people look for the run."""
        typed = self.run_config.train.output_dir
        return redact(typed) if is_url(typed) else str(out)

    def _write_hf_weights(self, checkpoint: Path) -> None:
        """Put the model beside the last checkpoint, as transformers and peft load it."""
        from penstock.engine.hf.export import write_folders

        form = ExportFormat(merged=not self.run_config.lora.save_lora_only)
        write_folders(checkpoint, self.origin, form, checkpoint / HF_WEIGHTS)

    def follow(self, out: Path) -> None:
        """Be a rank that does not lead, in this process; the leading rank runs the stage."""
        _here(self.job(out.resolve()))

    def job(self, output_dir: Path) -> Job:
        """What the ranks of this machine are told."""
        initial, typed = self.initial, self.run_config.train.init_checkpoint_path
        job = build_job(stage_key(self), self._config_here(), self.packed, self.origin, output_dir)
        return replace(
            job,
            initial=local_folder(typed, initial).resolve() if initial and typed else None,
            scores=self.reference.path.resolve() if self.reference else None,
        )

    def owned_files(self, out: Path) -> Iterable[Path]:
        """The checkpoint that is the result, and what is told of the data: what other stages read.
        Logs, metrics and other checkpoints come and go."""
        outcome = read_outcome(out)
        assert outcome, "run has found one"
        facts = outcome["facts"]
        if "checkpoint" not in facts:
            return [out / DATA]
        checkpoint = out / facts["checkpoint"]
        # Whether Hugging Face weights lie beside it is not identity, so they are not vouched for.
        files = regular_files(checkpoint)
        own = [path for path in files if (checkpoint / HF_WEIGHTS) not in path.parents]
        return [*own, out / DATA]


def claim(step: PlannedStage, *, fresh: bool) -> None:
    """Refuse an output folder that holds another run, or move that run aside.

    An unfinished run of another key may be taken over when the config names a checkpoint to load.
    """
    try:
        held = _held(step.path)
    except ArtifactError:
        if not fresh:
            raise
        backup_rename(step.path)
        return
    if held is None:
        return
    mine = stage_key(step.stage)
    if held["key"] == mine and not fresh:
        return
    if fresh:
        backup_rename(step.path)
        return
    sealed = (step.path / MANIFEST).is_file()
    if isinstance(step.stage, Train) and step.stage.checkpoint and not sealed:
        return
    changed = "\n".join(f"    {each}" for each in differences(identity(step.stage), held)[:12])
    what = "a finished run" if sealed else "an unfinished run"
    raise ConfigError(
        f"train.output_dir {step.where} holds {what} of another key: {short(held['key'])} there, "
        f"{short(mine)} here. What differs:\n{changed}\n"
        "  Name another train.output_dir, or add --fresh to move the old one aside."
    )


def require_checkpoint(job: Job) -> None:
    """Raise ArtifactError where there has to be a checkpoint to go on from, and none is."""
    root = job.output_dir / CHECKPOINTS
    if job.config.train.require_checkpoint and newest_checkpoint(root, job.key) is None:
        raise ArtifactError(
            f"train.require_checkpoint is true, and {root} holds no complete checkpoint of this "
            "run.\n  Write train.output_dir as it was, or leave require_checkpoint out to start "
            "fresh."
        )


def _held(folder: Path) -> dict[str, Any] | None:
    record = read_manifest(folder) or read_attempt(folder)
    if record is None:
        return None
    inputs = record["inputs"]
    flat = {k: v["key"] if isinstance(v, dict) else v for k, v in inputs.items()}
    fields = {name: record[name] for name in ("stage", "version", "settings", "key")}
    return {**fields, "inputs": flat}


def _here(job: Job) -> LaunchResult:
    """Be the leading rank ourselves; torchrun was started by hand and the others are with us."""
    from penstock.train.rank import run_by_hand

    run_by_hand(job)
    return LaunchResult(status=0)


def _keep_shown_data(out: Path, stage: Train) -> None:
    """Keep what the report shows of the data; a run does not fail for want of it."""
    from penstock.rows.decoding import decoder_of
    from penstock.train.data_samples import keep_shown_data

    try:
        keep_shown_data(
            out,
            stage.packed.path,
            stage.packed.facts.get("epoch_rows", {}).get("train", ()),
            stage.run_config.train.report_samples,
            lambda: decoder_of(stage.origin.tokenizer_path, stage.origin.tokenizer),
        )
    except (OSError, PenstockError) as error:
        sys.stderr.write(f"train: the report shows no samples of the data: {error}\n")


def _report(out: Path) -> None:
    """Write report.html; a run does not fail for want of its picture."""
    from penstock.train.report import write_report

    try:
        write_report(out)
    except OSError as error:
        sys.stderr.write(f"train: no report was written: {describe_os_error(error)}\n")
    except ArtifactError as error:
        sys.stderr.write(f"train: no report was written: {error}\n")
