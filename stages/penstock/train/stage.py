"""The train stage: its identity, its folder, and torchrun."""

import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from penstock.config.base import Settings
from penstock.config.run import RunConfig
from penstock.core import env
from penstock.core.compare import differences
from penstock.core.errors import CapabilityError, ConfigError, Interrupted, StageError
from penstock.core.files import read_json, regular_files
from penstock.core.hub import local_folder
from penstock.core.launch import run_ranks
from penstock.core.stage import (
    ATTEMPT,
    MANIFEST,
    Artifact,
    Facts,
    Input,
    Source,
    Stage,
    identity,
    key_of,
    short,
)
from penstock.core.store import Step, reason_of, set_aside
from penstock.engine.origin import Form, Origin
from penstock.train.job import HF_WEIGHTS, LOGS, METRICS, OUTCOME, Job


class TrainSettings(Settings):
    """Every written thing that changes what is learnt."""

    model: dict[str, Any]
    train: dict[str, Any]
    lora: dict[str, Any] = Field(default_factory=dict)
    rows_per_step: int
    """Packed rows in one optimizer step over all ranks."""
    last_batch: Literal["drop", "keep"]


@dataclass(frozen=True)
class Train(Stage):
    """Packed rows in, checkpoints out. How it is laid out over ranks is not identity."""

    name: ClassVar[str] = "train"
    version: ClassVar[int] = 1

    settings: TrainSettings
    packed: Artifact
    origin: Origin
    """Of which the config and the weights are identity; the tokenizer goes beside HF weights."""
    checkpoint: Source | None
    run_config: RunConfig
    ranks: Literal["torchrun", "this_process"] = "torchrun"

    @property
    def inputs(self) -> Mapping[str, Input]:
        """The packed rows, the model's config, its weights, and a checkpoint to start from."""
        found: dict[str, Input] = {"packed": self.packed, "config": self.origin.config}
        if self.origin.weights:
            found["weights"] = self.origin.weights
        if self.checkpoint:
            found["checkpoint"] = self.checkpoint
        return found

    def run(self, out: Path) -> Facts:
        """Train from the newest checkpoint in `out`. Raises Interrupted when asked to stop."""
        job = self._job(out.resolve())
        file = job.write()
        (out / OUTCOME).unlink(missing_ok=True)
        shutil.rmtree(out / LOGS, ignore_errors=True)
        (out / LOGS).mkdir(parents=True)
        if self.ranks == "torchrun":
            _torchrun(job, file)
        else:
            _here(job)
        outcome = read_json(out / OUTCOME)
        _report(out)
        if outcome["facts"] is None:
            raise Interrupted(
                f"train was asked to stop and saved step {outcome['step']} in {out}.\n"
                "  Run the same command again to go on from there.",
                signum=outcome["signal"] or 15,
            )
        if self.run_config.train.save_hf_weights:
            self._write_hf_weights(out / outcome["facts"]["checkpoint"])
        return outcome["facts"]

    def _write_hf_weights(self, checkpoint: Path) -> None:
        """Put the model beside the last checkpoint, as transformers and peft load it."""
        from penstock.engine.hf_export import write_folders

        form = Form(merged=not self.run_config.lora.save_lora_only)
        write_folders(checkpoint, self.origin, form, checkpoint / HF_WEIGHTS)

    def follow(self, out: Path) -> None:
        """Be a rank that does not lead, in this process; the leading rank runs the stage."""
        _here(self._job(out.resolve()))

    def _job(self, output_dir: Path) -> Job:
        origin, config = self.origin, self.origin.config_path
        if origin.config.pin["kind"] != "builtin":
            config = str(local_folder(config, origin.config).resolve())
        weights = None
        if origin.model_path and origin.weights:
            weights = local_folder(origin.model_path, origin.weights).resolve()
        return Job(
            key=key_of(self),
            config=self.run_config,
            packed=self.packed.path.resolve(),
            max_token_id=self.packed.facts["max_token_id"]["train"],
            config_path=config,
            weights=weights,
            output_dir=output_dir,
        )

    def owned_files(self, out: Path) -> Iterable[Path]:
        """The last checkpoint: what other stages read. Logs, metrics and older ones come and go."""
        outcome = read_json(out / OUTCOME)
        return regular_files(out / outcome["facts"]["checkpoint"])


def claim(step: Step, *, fresh: bool) -> None:
    """Refuse an output folder that holds another run, or move that run aside.

    An unfinished run of another key may be taken over when the config names a checkpoint to load.
    """
    held = _held(step.path)
    if held is None:
        return
    mine = key_of(step.stage)
    if held["key"] == mine and not fresh:
        return
    if fresh:
        set_aside(step.path)
        return
    sealed = (step.path / MANIFEST).is_file()
    if isinstance(step.stage, Train) and step.stage.checkpoint and not sealed:
        return
    changed = "\n".join(f"    {each}" for each in differences(identity(step.stage), held)[:12])
    what = "a finished run" if sealed else "an unfinished run"
    raise ConfigError(
        f"train.output_dir {step.path} holds {what} of another key: {short(held['key'])} there, "
        f"{short(mine)} here. What differs:\n{changed}\n"
        "  Name another train.output_dir, or add --fresh to move the old one aside."
    )


def _held(folder: Path) -> dict[str, Any] | None:
    for name in (MANIFEST, ATTEMPT):
        if (folder / name).is_file():
            record = read_json(folder / name)
            inputs = record["inputs"]
            flat = {k: v["key"] if isinstance(v, dict) else v for k, v in inputs.items()}
            return {
                "stage": record["stage"],
                "version": record["version"],
                "settings": record["settings"],
                "inputs": flat,
                "key": record["key"],
            }
    return None


def _here(job: Job) -> None:
    """Be the leading rank ourselves; torchrun was started by hand and the others are with us."""
    from penstock.train.main import run_by_hand

    run_by_hand(job)


def _report(out: Path) -> None:
    """Write report.html; a run does not fail for want of its picture."""
    from penstock.train.report import write_report

    try:
        write_report(out)
    except OSError as error:
        sys.stderr.write(f"train: no report was written: {reason_of(error)}\n")


def _torchrun(job: Job, file: Path) -> None:
    launch = job.config.launch
    environment = {
        # Never let a rank import our folders by their bare names.
        "PYTHONSAFEPATH": "1",
        # A store shared by all attempts serves stale addresses to restarted ranks.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
        **launch.env,
    }
    started = time.monotonic()
    progress = _Progress(job.output_dir / METRICS)

    def stalled() -> str | None:
        limit = launch.timeout
        if limit is None or progress.idle_seconds(started) < limit:
            return None
        return (
            f"no step ended for {limit:g} s (launch.timeout).\n"
            f"  See {job.output_dir / LOGS}, and raise launch.timeout if a step may take longer."
        )

    status = run_ranks(
        [*torchrun_arguments(job), "-m", "penstock.train.main", str(file)],
        environment=environment,
        sink=sys.stderr.buffer,
        stalled=stalled,
    )
    if not (job.output_dir / OUTCOME).is_file():
        raise _first_failure(job.output_dir / LOGS, status)


def torchrun_arguments(job: Job) -> list[str]:
    """What `launch` means in torchrun's words."""
    launch = job.config.launch
    grace = ["--shutdown-timeout", "75"]
    common = ["--nproc-per-node", str(num_local_ranks(job.config)), *grace]
    if launch.max_restarts:
        common += ["--max-restarts", str(launch.max_restarts)]
    if launch.nnodes == 1 and launch.rdzv_endpoint is None:
        return ["--standalone", *common]
    if launch.rdzv_endpoint is None:
        raise ConfigError(
            f"launch.nnodes is {launch.nnodes}, and nothing says where they meet.\n"
            "  Write launch.rdzv_endpoint, as host:port of the first node."
        )
    return [
        *("--nnodes", str(launch.nnodes)),
        *("--node-rank", str(launch.node_rank)),
        *("--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", launch.rdzv_endpoint),
        # Told outright: guessing the host by name fails in containers and clouds.
        *("--rdzv-conf", f"is_host={'true' if launch.node_rank == 0 else 'false'}"),
        *common,
    ]


def num_local_ranks(run: RunConfig) -> int:
    """Processes on this node: as written, else one per GPU, else one."""
    asked = run.launch.nproc_per_node
    return max(1, env.num_gpus()) if asked == "auto" else asked


class _Progress:
    """When the run last ended a step, seen from outside."""

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics
        self._seen: int = -1
        self._since = time.monotonic()

    def idle_seconds(self, started: float) -> float:
        size = self._metrics.stat().st_size if self._metrics.is_file() else 0
        if size != self._seen:
            self._seen, self._since = size, time.monotonic()
        return time.monotonic() - max(self._since, started)


def _first_failure(logs: Path, status: int) -> StageError:
    """The earliest error any rank left; later ones are mostly lost connections to the first."""
    records = sorted((read_json(p) for p in logs.glob("failure_*.json")), key=lambda r: r["time"])
    if not records:
        return StageError(
            f"a training process died without a word (torchrun's exit status {status}).\n"
            f"  It may have been killed for memory; see {logs}."
        )
    first = next((r for r in records if r["message"]), records[0])
    text = first["message"] or f"rank {first['rank']}: {first['error']}"
    log = logs / f"rank_{first['rank']}.log"
    failure = StageError(f"{text}\n  The traceback is in {log}.")
    if first["exit_code"] == CapabilityError.exit_code:
        failure.exit_code = first["exit_code"]
    return failure
