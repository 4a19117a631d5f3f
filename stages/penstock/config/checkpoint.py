"""What a training run saves, when, and what it starts from."""

from typing import Literal

from pydantic import Field

from penstock.config.roots import Root
from penstock.config.section import Section


class SaveBestConfig(Section):
    """By what the best checkpoint is told. It is kept, and saved if it is not yet, beside those
    that `save_total_limit` keeps; `checkpoints/best` names it. It is the run's result,
    which is exported."""

    metric: str | None = Field(default=None, min_length=1)
    """A name in the records of evaluations, such as `eval_loss`. Unset: there is no best one. Needs
    `eval_steps` or `eval_epochs`."""

    mode: Literal["min", "max"] | None = None
    """Whether less or more of it is better. Unset: more of a `token_accuracy`, less of all else."""


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
    """Write checkpoints while training goes on. What is saved is copied to the host's memory, which
    has to have room for it, and only the next update of the weights waits for that. The next save
    waits for the one before."""

    save_optimizer: bool = True
    """Save the optimizer's states too. `false` makes checkpoints of AdamW a third as large, but a
    run that goes on from one begins with an optimizer that knows nothing: it says so, and its
    numbers are not those of a run that was never interrupted."""

    save_total_limit: int | None = Field(default=None, ge=1)
    """Keep so many of the newest checkpoints, the best (`save_best`), and the one the run was
    started from. Unset: all."""

    save_best: SaveBestConfig = Field(default_factory=SaveBestConfig)
    """Keeping the checkpoint that evaluated best."""

    save_hf_weights: bool = True
    """Also leave the final weights in Hugging Face's format."""

    load_checkpoint_path: str | None = Field(default=None, min_length=1)
    """Checkpoint to start from; `auto` takes the newest in `output_dir`."""
