"""Further arguments of the learning rate schedule."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.effect import TRAINS, NotWith, OnlyWith

DecayStyle = Literal[
    "constant", "linear", "cosine", "polynomial", "inverse_sqrt", "wsd", "square", "sqrt", "noam",
    "noam_hold", "step", "exponential",
]  # fmt: skip

# Decay styles that reach `lr_min` at a known step; the others keep falling.
ENDING: tuple[DecayStyle, ...] = ("linear", "cosine", "polynomial", "wsd", "square", "sqrt")


DECAYS = OnlyWith(
    "train.lr_decay_style",
    unless=("constant",),
    words="a decay, such as lr_decay_style: cosine",
    why="the learning rate is constant and does not decay to it",
    unmet="notice",
)

NOT_NOAM = NotWith(
    "train.lr_decay_style",
    ("noam",),
    why="noam has a warmup of its own",
    instead="leave {field} out",
)

# Decay styles that may begin some steps after the warmup.
HOLDING: tuple[DecayStyle, ...] = (
    *("constant", "linear", "cosine", "polynomial", "inverse_sqrt"),
    *("square", "noam_hold", "step", "exponential"),
)


def _of(*styles: DecayStyle) -> OnlyWith:
    return OnlyWith("train.lr_decay_style", styles, why="is not used by {name}: {value}")


class ScheduleConfig(ConfigSection):
    """Further arguments of the learning rate schedule. Each is used by some styles of warmup or
    decay and is an error with the others. Steps are optimizer steps."""

    conditions: ClassVar[tuple[OnlyWith, ...]] = (TRAINS,)

    warmup_style: Annotated[
        Literal["zero_start", "plus_one"],
        OnlyWith(
            "train.has_warmup_style",
            words="lr_warmup_steps or lr_warmup_ratio",
            why="there is no warmup",
        ),
        NOT_NOAM,
    ] = "zero_start"
    """`zero_start`: step s of W warmup steps uses s/W, so the first step uses `lr_start`.
    `plus_one`: (s+1)/(W+1)."""

    hold_steps: Annotated[int, _of(*HOLDING), DECAYS] = Field(default=0, ge=0)
    """Steps at the peak between warmup and decay."""

    constant_steps: Annotated[int, _of(*ENDING)] = Field(default=0, ge=0)
    """Steps at `lr_min` at the end; the decay ends that many steps earlier."""

    num_cycles: Annotated[float, _of("cosine", "wsd")] = Field(default=0.5, gt=0)
    """`cosine`: number of cosine periods in the decay; 0.5 is one descent."""

    power: Annotated[float, _of("polynomial")] = Field(default=1.0, gt=0)
    """`polynomial`: exponent; 1 is linear, 2 falls fast first."""

    gamma: Annotated[float, _of("step", "exponential")] = Field(default=0.1, gt=0, le=1)
    """`step` and `exponential`: factor of the learning rate for every `step_size` steps."""

    step_size: Annotated[int, _of("step", "exponential")] = Field(default=1, gt=0)
    """`step` and `exponential`: number of steps in which the learning rate is multiplied by `gamma`
    once."""

    d_model: Annotated[int, _of("noam")] = Field(default=1, gt=0)
    """`noam`: the model's hidden size; the learning rate is divided by its square root."""

    decay_rate: Annotated[float, _of("noam_hold")] = Field(default=0.5, gt=0)
    """`noam_hold`: exponent of W/s; with 0.5 the learning rate falls with the square root of the
    steps."""

    timescale: Annotated[int | None, _of("inverse_sqrt")] = Field(default=None, gt=0)
    """`inverse_sqrt`: steps until the learning rate falls to about 0.7 of the peak. Unset: the
    warmup steps, or 10,000 without warmup."""

    decay_steps: Annotated[int | None, _of("wsd")] = Field(default=None, ge=0)
    """`wsd`: number of decay steps. Unset: a tenth of all steps."""

    decay_shape: Annotated[Literal["linear", "cosine", "sqrt"], _of("wsd")] = "linear"
    """`wsd`: shape of the decay. `sqrt` is 1 - sqrt(p): fast first."""
