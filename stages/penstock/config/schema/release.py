"""Continuous training: when a model is retrained, and when the new one replaces the released
one."""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from penstock.config.schema.base import ConfigSection, require
from penstock.config.schema.effect import OnlyWith
from penstock.config.schema.evaluation import metric_sign

FOLDER_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)

COMPARED = OnlyWith(
    "release.metric", unless=(None,), words="metric", why="is not used with metric: null"
)


class ReleaseConfig(ConfigSection):
    """Continuous training, for `penstock recur` and the flow `recurring` only: retrain when the
    sources have new data, and release the model if it is better than the released one."""

    conditions: ClassVar[tuple[OnlyWith, ...]] = (
        OnlyWith(
            "release.name",
            unless=(None,),
            words="release.name",
            why="nothing is released without release.name",
        ),
    )

    name: Annotated[
        str | None,
        require(
            FOLDER_NAME.fullmatch,
            "{value!r} is not a valid folder name; write letters, digits, and - _ . between them",
        ),
    ] = None
    """Name of the model: releases are `releases/<name>/0001` and so on, in
    `pipeline.artifacts_path`. Unset: nothing is released."""

    train_when: Literal["new_samples", "always", "never"] = "new_samples"
    """When to train: `new_samples`: if there are at least `min_new_samples`; `always`: each time;
    `never`: only prepare and count new data."""

    min_new_samples: Annotated[int, OnlyWith("release.train_when", ("new_samples",))] = Field(
        default=1, gt=0
    )
    """Number of new samples, compared by their tokens with those that the released model was
    trained on, that start a training run."""

    start_from: Literal["release", "model"] = "release"
    """Initial model: the released model or adapter (`release`; before the first release, as with
    `model`), or what `model` and `lora` name (`model`)."""

    metric: str | None = Field(default="eval_loss", min_length=1)
    """Evaluation metric that decides which model is better, measured for both models on the same
    held-out data. `null`: every trained model is released."""

    mode: Annotated[Literal["min", "max"] | None, COMPARED] = None
    """Whether lower (`min`) or higher (`max`) is better. Unset: `max` for accuracies, for rewards
    and log-probs of `chosen` and for margins; `min` for all others."""

    min_delta: Annotated[float, COMPARED] = Field(default=0.0, ge=0)
    """Smallest improvement over the released model for which the new one is released; an equal one
    never is."""

    keep_runs: int | None = Field(default=None, gt=0)
    """Number of newest training folders to keep; older ones are deleted once it is decided whether
    the new model is released. Unset: all. Releases do not need them."""

    @property
    def sign(self) -> int:
        """1 if higher is better, -1 if lower is better."""
        return metric_sign(self.metric or "", self.mode)
