"""When a model is trained again, and when the new one takes the place of the old."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.evaluation import metric_sign


def _name(value: str | None) -> str | None:
    if value is None or re.fullmatch(r"[A-Za-z0-9][\w.-]*", value, re.ASCII):
        return value
    raise ValueError(
        f"{value!r} is no name of a folder; write letters, digits, and - _ . between them"
    )


class ReleaseConfig(ConfigSection):
    """Training again when the sources have grown, as `penstock recur` and the flow `recurring` do,
    and releasing what is better than the model before it. Other commands do not ask."""

    name: Annotated[str | None, AfterValidator(_name)] = None
    """What the model is called: its releases are `releases/<name>/0001` and so on, in
    `pipeline.artifacts_path`. Unset: nothing is released."""

    train_when: Literal["new_samples", "always", "never"] = "new_samples"
    """When a model is trained: with `new_samples` once there are `min_new_samples`, `always` each
    time, `never` not at all, though new data is prepared and counted."""

    min_new_samples: int = Field(default=1, gt=0)
    """Samples that the released model was not trained on, told by their tokens, which are enough to
    train again."""

    start_from: Literal["release", "model"] = "release"
    """What training starts from: the model or adapter that is released (before there is one, and in
    `model` always, what `model` and `lora` say)."""

    metric: str | None = Field(default="eval_loss", min_length=1)
    """What decides which model is better: a number that evaluations tell, of both models on the
    same held-out rows. `null`: what is trained is released."""

    mode: Literal["min", "max"] | None = None
    """Whether less or more of it is better. Unset: more of a `token_accuracy`, less of all else."""

    min_delta: float = Field(default=0.0, ge=0)
    """How much better than the released model a new one has to be; equal is never enough."""

    keep_runs: int | None = Field(default=None, gt=0)
    """Keep the training folders of so many models, the newest, and delete those before them once
    it is decided what becomes of the new one. Unset: all. Releases need none of them."""

    @property
    def sign(self) -> int:
        """What makes more of the metric better: 1 or -1."""
        return metric_sign(self.metric or "", self.mode)
