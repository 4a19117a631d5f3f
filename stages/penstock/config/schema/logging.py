"""What a training run tells while it goes on."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.cache_key import Unkeyed
from penstock.core.remote.urls import redact


def _without_password(uri: str | None) -> str | None:
    if uri is not None and uri != redact(uri):
        raise ValueError(
            "holds what is secret, and a run's configuration is kept beside its results; write the "
            "address alone, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the "
            "environment"
        )
    return uri


LogRanks = Literal["all", "local0", "global0"]


class LoggingConfig(ConfigSection):
    """Progress, trackers and profiles."""

    log_format: Unkeyed[Literal["progress_bar", "structured", "json"]] = "progress_bar"
    """What stderr shows: `progress_bar`, one line for people; `structured`, lines of `key=value`;
    `json`, one object a line."""

    log_interval: Unkeyed[int] = Field(default=1, gt=0)
    """Show a line, and send it to TensorBoard, MLflow and trackio, every so many steps and at the
    end. `metrics.jsonl` has every step."""

    log_ranks: Unkeyed[LogRanks] = "global0"
    """Which ranks say on their terminal what they begin and of what they warn: the first of all
    (`global0`), the first of each machine (`local0`), or `all`. Steps are shown by the first of all
    alone. The log of every rank is in `output_dir`/logs, whatever this says."""

    log_grad_norm: Unkeyed[bool | Literal["layers"]] = True
    """Tell the norm of all gradients together, before they are cut; `layers`: and of each layer.
    One pass over them serves both."""

    log_param_norm: Unkeyed[bool | Literal["layers"]] = False
    """Tell the norm of all trained parameters together, after the update; `layers`: and of each
    layer."""

    log_router_stats: Unkeyed[bool] = True
    """Mixture of experts: write to `metrics.jsonl`, for every layer of every step, how evenly
    tokens were shared out among experts."""

    log_loss_spikes: Unkeyed[float] = Field(default=6.0, ge=0)
    """Warn of a step whose loss is so many standard deviations above the last hundred, and name
    the rank and the packed rows it came from. 0: never."""

    log_recovery_timing: Unkeyed[bool] = False
    """Write to `metrics.jsonl`, with the first step of a run that goes on from a checkpoint of its
    own, how long it was in coming back: `recovery_seconds` from the start of the first rank's
    process to the end of that step, and of each phase."""

    report_interval: Unkeyed[float] = Field(default=30.0, ge=0)
    """Write `report.html` again every so many seconds while training runs. 0: only at the end."""

    report_samples: Unkeyed[int] = Field(default=3, ge=0, le=50)
    """Show so many training samples in `report.html`, with what of them is trained; of each some
    400 tokens at most, without what looks like a credential. 0: none of the data's text."""

    use_wandb: Unkeyed[bool | None] = None
    """Log to Weights & Biases; without a login, into `output_dir`, to be sent later with
    `wandb sync`. Unset: only when this machine is logged in there."""

    use_tensorboard: Unkeyed[bool] = False
    """Write events for TensorBoard to `log_dir`."""

    log_dir: Unkeyed[str | None] = Field(default=None, min_length=1)
    """Folder on this machine for TensorBoard's events; runs that share one are shown as one. Unset:
    `output_dir`/tensorboard. Everything else that is told of a run stays in `output_dir`."""

    use_mlflow: Unkeyed[bool] = False
    """Log to MLflow."""

    use_trackio: Unkeyed[bool] = False
    """Log to trackio, on this machine."""

    wandb_project: Unkeyed[str] = Field(default="penstock", min_length=1)
    """What the run is part of: the project at Weights & Biases and in trackio, the experiment in
    MLflow."""

    wandb_name: Unkeyed[str | None] = Field(default=None, min_length=1)
    """Name of the run in trackers. Unset: `pipeline.name`."""

    wandb_tags: Unkeyed[list[str] | None] = None
    """Tags of the run in trackers that have them."""

    wandb_log_interval: Unkeyed[int] = Field(default=1, gt=0)
    """Weights & Biases: log every so many steps."""

    mlflow_tracking_uri: Unkeyed[Annotated[str | None, AfterValidator(_without_password)]] = Field(
        default=None, min_length=1
    )
    """Where MLflow's server or store is. Unset: what MLFLOW_TRACKING_URI says, else the file
    mlflow.db in `output_dir`."""

    enable_profiling: Unkeyed[bool] = False
    """Record a few steps with PyTorch's profiler: a trace for ui.perfetto.dev and, on GPUs with
    `profile_profile_memory`, a snapshot of memory for pytorch.org/memory_viz."""

    profile_start_step: Unkeyed[int] = Field(default=1, ge=0)
    """Profile: recording begins when so many steps are done. 1 leaves out the first step, which is
    like no other."""

    profile_end_step: Unkeyed[int] = Field(default=2, ge=0)
    """Profile: recording ends when so many steps are done."""

    profile_trace_dir: Unkeyed[str] = Field(default="./trace", min_length=1)
    """Profile: folder for traces, whose names begin with the run's key."""

    profile_record_shapes: Unkeyed[bool] = True
    """Profile: record the shapes of inputs."""

    profile_profile_memory: Unkeyed[bool] = True
    """Profile: record what is allocated, and on GPUs where."""

    profile_with_stack: Unkeyed[bool] = True
    """Profile: record Python stacks."""

    profile_rank0_only: Unkeyed[bool] = True
    """Profile: only the first rank; false writes large files for each."""
