"""Logs, trackers, the report and the profiler."""

from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.config.schema.base import FOLDER, PATH, ConfigSection, require
from penstock.config.schema.cache_key import Unkeyed
from penstock.config.schema.effect import OnlyWith
from penstock.config.schema.registered import Registered
from penstock.config.schema.served import Served
from penstock.core.extensions import TRACKERS
from penstock.core.remote.urls import is_url, redact

LogRanks = Literal["all", "local0", "global0"]


class LoggingConfig(ConfigSection):
    """Logs, trackers, the report and the profiler."""

    log_format: Unkeyed[Literal["progress_bar", "structured", "json"]] = "progress_bar"
    """Format of stderr: `progress_bar`, one line for people; `structured`, lines of `key=value`;
    `json`, one object a line."""

    log_interval: Unkeyed[int] = Field(default=1, gt=0)
    """Show a line, and log to TensorBoard, MLflow and trackio, every `log_interval` steps and at
    the end. `metrics.jsonl` has every step."""

    log_ranks: Unkeyed[LogRanks] = "global0"
    """Ranks that print log messages and warnings on their terminal: rank 0 (`global0`), the first
    rank of each node (`local0`), or `all`. Only rank 0 shows steps. The log of every rank is in
    `output_dir`/logs, whatever this is."""

    log_grad_norm: Unkeyed[bool | Literal["layers"]] = True
    """Log the global norm of the gradients before clipping; `layers`: also the norm of each layer,
    in the same pass."""

    log_param_norm: Unkeyed[bool | Literal["layers"]] = False
    """Log the global norm of the trained parameters after the update; `layers`: also the norm of
    each layer."""

    log_router_stats: Annotated[
        Unkeyed[bool],
        Served(
            doc="Mixture of experts: report with each backward pass how evenly tokens were "
            "distributed over experts."
        ),
    ] = True
    """Mixture of experts: write to `metrics.jsonl`, for every layer of every step, how evenly
    tokens were distributed over experts."""

    log_loss_spikes: Unkeyed[float] = Field(default=6.0, ge=0)
    """Loss spikes: warn of a step whose loss is this many standard deviations above the last
    hundred, and name the rank and the packed sequences that caused it. 0: never."""

    log_recovery_timing: Unkeyed[bool] = False
    """Write to `metrics.jsonl`, with the first step of a run that resumes from a checkpoint of its
    own, how long the resume took: `recovery_seconds`, from the start of rank 0's process to the end
    of that step, and the time of each phase."""

    report_interval: Unkeyed[float] = Field(default=30.0, ge=0)
    """Update `report.html` every `report_interval` seconds during training. 0: only at the end."""

    report_samples: Unkeyed[int] = Field(default=3, ge=0, le=50)
    """Number of training samples that `report.html` shows, with their loss mask; about 400 tokens
    of each at most, without text that looks like a credential. 0: no text of the data."""

    use_wandb: Unkeyed[bool | None] = None
    """Log to Weights & Biases; without a login, offline into `output_dir`, to be uploaded with
    `wandb sync`. Unset: only if this machine is logged in."""

    use_tensorboard: Unkeyed[bool] = False
    """Log to TensorBoard, in `log_dir`."""

    log_dir: Annotated[
        Unkeyed[str | None],
        FOLDER,
        require(
            lambda folder: not is_url(folder),
            "is a URL, but event files are written to a local folder; leave it out: event files in"
            " train.output_dir are uploaded with it",
        ),
        OnlyWith(
            "train.use_tensorboard",
            why="is the folder of TensorBoard's event files, and {name} is {value}",
        ),
    ] = Field(default=None, min_length=1)
    """Local folder of TensorBoard's event files; TensorBoard shows runs that share one as one run.
    Unset: `output_dir`/tensorboard. All other logs stay in `output_dir`."""

    use_mlflow: Unkeyed[bool] = False
    """Log to MLflow."""

    use_trackio: Unkeyed[bool] = False
    """Log to trackio, on this machine."""

    trackers: Unkeyed[
        dict[
            Annotated[str, Registered(TRACKERS, "is ours; write train.use_{name}: true")],
            dict[str, Any],
        ]
    ] = Field(default_factory=dict[str, dict[str, Any]])
    """Further trackers, of installed packages, by name, each with its options."""

    wandb_project: Unkeyed[str] = Field(default="penstock", min_length=1)
    """Project in Weights & Biases and trackio, experiment in MLflow."""

    wandb_name: Unkeyed[str | None] = Field(default=None, min_length=1)
    """Name of the run in trackers. Unset: `pipeline.name`."""

    wandb_tags: Unkeyed[list[str] | None] = None
    """Tags of the run, in trackers that have tags."""

    wandb_log_interval: Unkeyed[int] = Field(default=1, gt=0)
    """Weights & Biases: log every `wandb_log_interval` steps."""

    mlflow_tracking_uri: Annotated[
        Unkeyed[str | None],
        PATH,
        require(
            lambda uri: uri == redact(uri),
            "contains a secret, and the config of a run is stored with its results; write only the"
            " address, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the"
            " environment",
        ),
        OnlyWith("train.use_mlflow"),
    ] = Field(default=None, min_length=1)
    """MLflow: URI of the tracking server or store. Unset: MLFLOW_TRACKING_URI, else the file
    mlflow.db in `output_dir`."""

    enable_profiling: Unkeyed[bool] = False
    """Profile a few steps with PyTorch's profiler: a trace for ui.perfetto.dev and, on GPUs with
    `profile_profile_memory`, a memory snapshot for pytorch.org/memory_viz."""

    profile_start_step: Unkeyed[int] = Field(default=1, ge=0)
    """Profiler: start after this many steps. 1 skips the first step, which is not typical."""

    profile_end_step: Unkeyed[int] = Field(default=2, ge=0)
    """Profiler: stop after this many steps."""

    profile_trace_dir: Unkeyed[Annotated[str, FOLDER]] = Field(default="./trace", min_length=1)
    """Profiler: folder for traces, whose names begin with the run's cache key."""

    profile_record_shapes: Unkeyed[bool] = True
    """Profiler: record input shapes."""

    profile_profile_memory: Unkeyed[bool] = True
    """Profiler: record memory allocations, and on GPUs their stacks."""

    profile_with_stack: Unkeyed[bool] = True
    """Profiler: record Python stacks."""

    profile_rank0_only: Unkeyed[bool] = True
    """Profiler: only on rank 0; false writes large files for every rank."""
