"""What a training run saves, when, and what it starts from."""

import re
from string import Formatter
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.cache_key import (
    KeyedByContent,
    KeyedIfEvaluated,
    KeyedUnlessDefault,
    Unkeyed,
)
from penstock.config.schema.pipeline import Root

GLOBAL_STEP = "global_step_{step}"
"""What they are called where nothing else is written."""

_FIELDS = ("step", "consumed_samples")
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*", re.ASCII)


def _names_a_folder(template: str) -> str:
    """Raises ValueError for what names no folder of its own for every step."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"is no template: {error}; write {GLOBAL_STEP}") from None
    fields = [field for _, field, _, _ in parts if field is not None]
    is_plain = all(not spec and not conversion for _, _, spec, conversion in parts)
    if (
        not is_plain
        or fields.count("step") != 1
        or sorted(fields) != sorted({*fields} & {*_FIELDS})
    ):
        raise ValueError(
            "has to hold {step} once, and may hold {consumed_samples} once, and no other; write"
            f" {GLOBAL_STEP}"
        )
    if len(fields) > 1 and not re.search(r"\D", parts[1][0]):
        raise ValueError("lets two numbers run together; write something between them")
    name = template.format(step=1, consumed_samples=1)
    if not _FOLDER.fullmatch(name) or name.endswith(".part"):
        raise ValueError(
            "is to be the name of a folder: letters, digits and . _ = + - alone, with a letter or a"
            " digit first, and not .part at the end"
        )
    if template != GLOBAL_STEP and step_in(GLOBAL_STEP, name) is not None:
        raise ValueError(f"looks like {GLOBAL_STEP}, and another number follows; write that")
    return template


CheckpointName = Annotated[str, AfterValidator(_names_a_folder)]


def step_in(template: str, name: str) -> int | None:
    """The step that a name made of the template tells; None if it is no such name."""
    pattern = ""
    for text, field, _, _ in Formatter().parse(template):
        number = r"(\d+)" if field == "step" else r"\d+"
        pattern += re.escape(text) + (number if field else "")
    found = re.fullmatch(pattern, name, re.ASCII)
    return int(found[1]) if found else None


def _empty_is_unset(value: str | None) -> str | None:
    return value or None


class SaveBestConfig(ConfigSection):
    """By what the best checkpoint is told. It is kept, and saved if it is not yet, beside those
    that `save_total_limit` keeps; `checkpoints/best` names it. It is the run's result,
    which is exported."""

    metric: str | None = Field(default=None, min_length=1)
    """A name in the records of evaluations, such as `eval_loss`. Unset: there is no best one. Needs
    `eval_steps` or `eval_epochs`."""

    mode: Literal["min", "max"] | None = None
    """Whether less or more of it is better. Unset: more of a `token_accuracy`, less of all else."""


class CheckpointConfig(ConfigSection):
    """Checkpoints and outputs."""

    output_dir: Unkeyed[Root] = Field(min_length=1)
    """Folder for checkpoints, metrics, logs and the exported model. With several nodes it must be
    on a file system they share; with one it may be the URL of an object store, where every
    checkpoint is kept as soon as it is saved, and from where another machine goes on."""

    ckpt_manager: Unkeyed[Literal["dcp"]] = "dcp"
    """Checkpoint format: `dcp`, PyTorch's distributed checkpoints."""

    save_steps: Unkeyed[int] = Field(default=0, ge=0)
    """Save a checkpoint every so many optimizer steps; 0 does not save by steps."""

    save_epochs: Unkeyed[float] = Field(default=1.0, ge=0)
    """Save a checkpoint every so many epochs; fractions allowed (0.25: four times an epoch), 0 does
    not save by epochs."""

    save_async: Unkeyed[bool] = False
    """Write checkpoints while training goes on. What is saved is copied to the host's memory, which
    has to have room for it, and only the next update of the weights waits for that. The next save
    waits for the one before."""

    save_optimizer: KeyedUnlessDefault[bool] = True
    """Save the optimizer's states too. `false` makes checkpoints of AdamW a third as large, but a
    run that goes on from one begins with an optimizer that knows nothing: it says so, and its
    numbers are not those of a run that was never interrupted."""

    ckpt_name: Unkeyed[CheckpointName | None] = None
    """What a checkpoint's folder is called: a text with `{step}` and, if wanted,
    `{consumed_samples}`, the packed rows trained on until then. Unset: `global_step_{step}`."""

    ckpt_weights: KeyedUnlessDefault[Literal["master", "compute"]] = "master"
    """Which weights a checkpoint holds: `master`, those that the optimizer steps; `compute`, what
    layers compute with, which in bfloat16 are half as large. A run that goes on from these says
    so: its numbers are not those of a run that was never interrupted."""

    ckpt_quant: KeyedUnlessDefault[Literal["none", "int8", "int4"]] = "none"
    """In what a checkpoint holds the moments of `adamw` and `anyprecision_adamw`: `none`, as they
    are; `int8` or `int4`, a quarter or an eighth as large as in fp32. A run that goes on from these
    says so: its numbers are not those of a run that was never interrupted. All are read, whatever
    this says."""

    save_total_limit: Unkeyed[int | None] = Field(default=None, ge=1)
    """Keep so many of the newest checkpoints, the best (`save_best`), and the one the run was
    started from. Unset: all."""

    save_best: KeyedIfEvaluated[SaveBestConfig] = Field(default_factory=SaveBestConfig)
    """Keeping the checkpoint that evaluated best."""

    save_hf_weights: Unkeyed[bool] = True
    """Also leave the final weights in Hugging Face's format."""

    load_checkpoint_path: KeyedByContent[Annotated[str | None, AfterValidator(_empty_is_unset)]] = (
        None
    )
    """Checkpoint to start from; `auto` takes the newest in `output_dir`. Unset or empty: a run
    starts anew, or goes on from its own checkpoints in `output_dir` where it was interrupted."""

    require_checkpoint: Unkeyed[bool] = False
    """With `load_checkpoint_path: auto`: fail where there is none, instead of starting fresh."""

    load_optimizer: KeyedUnlessDefault[bool] = True
    """Take the optimizer's states from the checkpoint that `load_checkpoint_path` means. `false`
    takes its weights and its position, and the optimizer, which may then be another one, starts
    anew; after a named one, a run that is interrupted goes on from its own checkpoints in full."""

    init_checkpoint_path: KeyedByContent[str | None] = Field(default=None, min_length=1)
    """Weights to start from, at step 0: a checkpoint of a training run, or a model in Hugging
    Face's format (a folder, a URL or a hub id), which then stands in for `model.model_path`; config
    and tokenizer stay those of `model`. A run that has checkpoints of its own goes on from these.
    """
