"""What a training run saves, when, and what it starts from."""

from typing import Literal

from pydantic import Field

from penstock.config.roots import Root
from penstock.config.section import Section


class CheckpointConfig(Section):
    """Checkpoints and outputs."""

    output_dir: Root = Field(min_length=1)
    """Folder for checkpoints, metrics, logs and the exported model. With several nodes it must be
    on a file system they share; with one it may be the URL of an object store, where every
    checkpoint is kept as soon as it is saved, and from where another machine goes on."""

    ckpt_manager: Literal["dcp"] = "dcp"
    """Checkpoint format: `dcp`, PyTorch's distributed checkpoints."""

    save_steps: int = Field(default=0, ge=0)
    """Save a checkpoint every so many optimizer steps; 0 does not save by steps."""

    save_epochs: float = Field(default=1.0, ge=0)
    """Save a checkpoint every so many epochs; fractions allowed (0.25: four times an epoch), 0 does
    not save by epochs."""

    save_async: bool = False
    """Write checkpoints while training goes on: it stops only to copy what is saved to the host's
    memory, which has to have room for it. The next save waits for the one before."""

    save_total_limit: int | None = Field(default=None, ge=1)
    """Keep so many of the newest checkpoints, and the one the run was started from. Unset: all."""

    save_hf_weights: bool = True
    """Also leave the final weights in Hugging Face's format."""

    load_checkpoint_path: str | None = Field(default=None, min_length=1)
    """Checkpoint to start from; `auto` takes the newest in `output_dir`."""
