"""What a training run tells while it goes on."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.config.availability import Later
from penstock.config.section import Section


class LoggingConfig(Section):
    """Progress, trackers and profiles."""

    log_format: Literal["progress_bar", "structured"] = "progress_bar"
    """`progress_bar` for people, `structured` (`key=value` lines) for programs."""

    log_router_stats: bool = True
    """Mixture of experts: write to `metrics.jsonl`, for every layer of every step, how evenly
    tokens were shared out among experts."""

    use_wandb: Annotated[bool | None, Later(allowed=(False,))] = None
    """Log to Weights & Biases. Unset: only when this machine is logged in there."""

    wandb_project: Annotated[str, Later()] = Field(default="penstock", min_length=1)
    """Weights & Biases: project."""

    wandb_name: Annotated[str | None, Later()] = None
    """Weights & Biases: name of the run."""

    wandb_tags: Annotated[list[str] | None, Later()] = None
    """Weights & Biases: tags of the run."""

    wandb_log_interval: Annotated[int, Later()] = Field(default=1, gt=0)
    """Weights & Biases: log every so many steps."""

    enable_profiling: Annotated[bool, Later()] = False
    """Record a PyTorch profile."""

    profile_start_step: Annotated[int, Later()] = Field(default=1, ge=0)
    """Profile: first step."""

    profile_end_step: Annotated[int, Later()] = Field(default=2, ge=0)
    """Profile: the step it stops at."""

    profile_trace_dir: Annotated[str, Later()] = Field(default="./trace", min_length=1)
    """Profile: folder for traces."""

    profile_record_shapes: Annotated[bool, Later()] = True
    """Profile: record the shapes of inputs."""

    profile_profile_memory: Annotated[bool, Later()] = True
    """Profile: record memory."""

    profile_with_stack: Annotated[bool, Later()] = True
    """Profile: record Python stacks."""

    profile_rank0_only: Annotated[bool, Later()] = True
    """Profile: only the first rank; false writes large files for each."""
