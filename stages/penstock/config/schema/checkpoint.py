"""Checkpoints: what a run saves, when, and what it starts from."""

import re
from string import Formatter
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.config.schema.base import PATH, ConfigSection
from penstock.config.schema.cache_key import (
    KeyedByContent,
    KeyedIfEvaluated,
    KeyedUnlessDefault,
    Unkeyed,
)
from penstock.config.schema.effect import NotWith, OnlyWith
from penstock.config.schema.evaluation import EVALUATED
from penstock.config.schema.pipeline import Root

# The default name of a checkpoint.
GLOBAL_STEP = "global_step_{step}"

_FIELDS = ("step", "consumed_samples")
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*", re.ASCII)


def _check_ckpt_name(template: str) -> str:
    # Raises ValueError for a template that does not give every step a folder name of its own.
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"is not a valid template: {error}; write {GLOBAL_STEP}") from None
    fields = [field for _, field, _, _ in parts if field is not None]
    is_plain = all(not spec and not conversion for _, _, spec, conversion in parts)
    if (
        not is_plain
        or fields.count("step") != 1
        or sorted(fields) != sorted({*fields} & {*_FIELDS})
    ):
        raise ValueError(
            "must have {step} once, may have {consumed_samples} once, and no other field; write"
            f" {GLOBAL_STEP}"
        )
    if len(fields) > 1 and not re.search(r"\D", parts[1][0]):
        raise ValueError("has two numbers without a separator; write one between them")
    name = template.format(step=1, consumed_samples=1)
    if not _FOLDER.fullmatch(name) or name.endswith(".part"):
        raise ValueError(
            "must be a folder name: letters, digits and . _ = + - only, with a letter or digit"
            " first, and not .part at the end"
        )
    if template != GLOBAL_STEP and step_in(GLOBAL_STEP, name) is not None:
        raise ValueError(f"looks like {GLOBAL_STEP}, and another number follows; write that")
    return template


CheckpointName = Annotated[str, AfterValidator(_check_ckpt_name)]


def step_in(template: str, name: str) -> int | None:
    """The step in a name that was made from the template; None for any other name."""
    pattern = ""
    for text, field, _, _ in Formatter().parse(template):
        number = r"(\d+)" if field == "step" else r"\d+"
        pattern += re.escape(text) + (number if field else "")
    # Otherwise \d also matches the digits of other scripts.
    match = re.fullmatch(pattern, name, re.ASCII)
    return int(match[1]) if match else None


RELEASE = "release.name"
NOT_RELEASED = NotWith(
    RELEASE,
    unless=(None,),
    spares=("auto",),
    why="every run would start from this checkpoint",
    instead="leave it out, and write model.model_path for the first run",
)


class SaveBestConfig(ConfigSection):
    """The best checkpoint, by an evaluation metric. It is saved if it is not yet, and kept besides
    those of `save_total_limit`; `checkpoints/best` links to it. It is the run's result, which is
    exported."""

    metric: Annotated[str | None, *EVALUATED] = Field(default=None, min_length=1)
    """The metric: a name in the records of evaluations, such as `eval_loss`. Unset: no best
    checkpoint. Needs `eval_steps` or `eval_epochs`."""

    mode: Annotated[
        Literal["min", "max"] | None,
        OnlyWith(
            "train.save_best.metric",
            unless=(None,),
            words="metric",
            why="is {own}, but no metric is set",
        ),
    ] = None
    """Whether lower (`min`) or higher (`max`) is better. Unset: `max` for accuracies, for rewards
    and log-probs of `chosen` and for margins; `min` for all others."""


class CheckpointConfig(ConfigSection):
    """Checkpoints and outputs."""

    output_dir: Unkeyed[Root] = Field(min_length=1)
    """Folder for checkpoints, metrics, logs and the exported model. With several nodes it must be
    on a shared file system. With one node it may be the URL of an object store: every checkpoint is
    uploaded when it is saved, and another machine can resume from it."""

    ckpt_manager: Unkeyed[Literal["dcp"]] = "dcp"
    """Checkpoint format: `dcp`, PyTorch Distributed Checkpoint."""

    save_steps: Unkeyed[int] = Field(default=0, ge=0)
    """Save a checkpoint every `save_steps` optimizer steps; 0: not by steps."""

    save_epochs: Unkeyed[float] = Field(default=1.0, ge=0)
    """Save a checkpoint every `save_epochs` epochs; fractions are allowed (0.25: four times an
    epoch); 0: not by epochs."""

    save_async: Unkeyed[bool] = False
    """Asynchronous checkpoints: write them in the background while training continues. The state is
    first copied to host memory, which must have room for it; only the next update of the weights
    waits for this copy. The next save waits for the previous one."""

    save_optimizer: KeyedUnlessDefault[bool] = True
    """Save optimizer states too. `false` makes checkpoints of AdamW a third as large, but a run
    that resumes from one starts with empty optimizer states: it reports this, and its results
    differ from those of an uninterrupted run."""

    ckpt_name: Unkeyed[CheckpointName | None] = None
    """Template of the name of a checkpoint folder, with `{step}` and, optionally,
    `{consumed_samples}`, the number of packed sequences trained on so far. Unset:
    `global_step_{step}`."""

    ckpt_weights: Annotated[
        KeyedUnlessDefault[Literal["master", "compute"]],
        OnlyWith("train.rounds_weights", words="mixed precision", unmet="silent"),
    ] = "master"
    """Weights in a checkpoint: `master`, those that the optimizer updates; `compute`, in the dtype
    that layers compute in, half as large in bfloat16. A run that resumes from the latter reports
    this: its results differ from those of an uninterrupted run."""

    ckpt_quant: Annotated[
        KeyedUnlessDefault[Literal["none", "int8", "int4"]],
        OnlyWith(
            "train.optimizer",
            ("adamw", "anyprecision_adamw"),
            why="quantizes the moments of adamw and anyprecision_adamw, and the {name} is {value}",
        ),
        NotWith(
            "train.save_optimizer",
            (False,),
            why="quantizes optimizer states, which save_optimizer: false does not save",
        ),
    ] = "none"
    """Quantization of the moments of `adamw` and `anyprecision_adamw` in checkpoints: `none`;
    `int8` or `int4`, a quarter or an eighth of the size in fp32. A run that resumes from a
    quantized checkpoint reports this: its results differ from those of an uninterrupted run.
    Checkpoints of all three kinds can be loaded, whatever this is."""

    save_total_limit: Unkeyed[int | None] = Field(default=None, ge=1)
    """Number of newest checkpoints to keep, besides the best one (`save_best`) and the one that the
    run was started from. Unset: all."""

    save_best: KeyedIfEvaluated[SaveBestConfig] = Field(default_factory=SaveBestConfig)
    """Keep the best checkpoint by an evaluation metric."""

    save_hf_weights: Unkeyed[bool] = True
    """Also save the final weights in Hugging Face's format."""

    load_checkpoint_path: Annotated[
        KeyedByContent[Annotated[str | None, PATH, AfterValidator(lambda path: path or None)]],
        NOT_RELEASED,
    ] = None
    """Checkpoint to start from; `auto`: the newest one in `output_dir`. Unset or empty: a new run
    starts from scratch, an interrupted run resumes from its own checkpoints in `output_dir`."""

    require_checkpoint: Annotated[
        Unkeyed[bool],
        OnlyWith(
            "train.load_checkpoint_path",
            unless=(None,),
            words="load_checkpoint_path: auto",
            why="no checkpoint is loaded",
        ),
        OnlyWith(
            "train.load_checkpoint_path", ("auto",), why="a named checkpoint is required anyway"
        ),
        NotWith(
            RELEASE,
            unless=(None,),
            why="each run has a new folder without checkpoints",
            instead="leave it out",
        ),
    ] = False
    """With `load_checkpoint_path: auto`: fail if there is no checkpoint instead of starting from
    scratch."""

    load_optimizer: Annotated[
        KeyedUnlessDefault[bool],
        OnlyWith(
            "train.load_checkpoint_path",
            unless=(None,),
            words="load_checkpoint_path: auto for the run's own checkpoints",
            why="false is an option of load_checkpoint_path, which is not set",
        ),
    ] = True
    """Load optimizer states from the checkpoint of `load_checkpoint_path`. `false` loads weights
    and position only and starts with empty optimizer states, so the optimizer may be another one.
    If the path names a checkpoint, an interrupted run still resumes from its own checkpoints in
    full."""

    init_checkpoint_path: Annotated[
        KeyedByContent[str | None],
        PATH,
        NotWith(
            "train.load_checkpoint_path",
            unless=(None, "auto"),
            why="load_checkpoint_path names another checkpoint",
            instead="leave one of the two out, or write load_checkpoint_path: auto to resume from"
            " the run's own checkpoints",
        ),
        NOT_RELEASED,
    ] = Field(default=None, min_length=1)
    """Weights to start from, at step 0: a checkpoint of a training run, or a model in Hugging
    Face's format (a folder, a URL or a hub id), which then replaces `model.model_path`; config and
    tokenizer remain those of `model`. A run that has checkpoints of its own resumes from these."""
