"""Further arguments of the learning rate schedule."""

from typing import Literal

from pydantic import Field

from penstock.config.schema.base import ConfigSection

DecayStyle = Literal[
    "constant",
    "linear",
    "cosine",
    "polynomial",
    "inverse_sqrt",
    "wsd",
    "square",
    "sqrt",
    "noam",
    "noam_hold",
    "step",
    "exponential",
]


class ScheduleConfig(ConfigSection):
    """Further arguments of the learning rate schedule. Each is used by some styles of warmup or
    decay and is an error with the others. Steps are optimizer steps."""

    warmup_style: Literal["zero_start", "plus_one"] = "zero_start"
    """`zero_start`: step s of W warmup steps uses s/W, so the first step uses `lr_start`.
    `plus_one`: (s+1)/(W+1)."""

    hold_steps: int = Field(default=0, ge=0)
    """Steps at the peak between warmup and decay."""

    constant_steps: int = Field(default=0, ge=0)
    """Steps at `lr_min` at the end; the decay ends that many steps earlier."""

    num_cycles: float = Field(default=0.5, gt=0)
    """`cosine`: number of cosine periods in the decay; 0.5 is one descent."""

    power: float = Field(default=1.0, gt=0)
    """`polynomial`: exponent; 1 is linear, 2 falls fast first."""

    gamma: float = Field(default=0.1, gt=0, le=1)
    """`step` and `exponential`: factor of the learning rate for every `step_size` steps."""

    step_size: int = Field(default=1, gt=0)
    """`step` and `exponential`: number of steps in which the learning rate is multiplied by `gamma`
    once."""

    d_model: int = Field(default=1, gt=0)
    """`noam`: the model's hidden size; the learning rate is divided by its square root."""

    decay_rate: float = Field(default=0.5, gt=0)
    """`noam_hold`: exponent of W/s; with 0.5 the learning rate falls with the square root of the
    steps."""

    timescale: int | None = Field(default=None, gt=0)
    """`inverse_sqrt`: steps until the learning rate falls to about 0.7 of the peak. Unset: the
    warmup steps, or 10,000 without warmup."""

    decay_steps: int | None = Field(default=None, ge=0)
    """`wsd`: number of decay steps. Unset: a tenth of all steps."""

    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """`wsd`: shape of the decay. `sqrt` is 1 - sqrt(p): fast first."""


ENDING: tuple[DecayStyle, ...] = ("linear", "cosine", "polynomial", "wsd", "square", "sqrt")
"""Decay styles that reach `lr_min` at a known step; the others keep falling."""

READ_BY: dict[str, tuple[DecayStyle, ...]] = {
    "hold_steps": (
        *("constant", "linear", "cosine", "polynomial", "inverse_sqrt"),
        *("square", "noam_hold", "step", "exponential"),
    ),
    "constant_steps": ENDING,
    "num_cycles": ("cosine", "wsd"),
    "power": ("polynomial",),
    "gamma": ("step", "exponential"),
    "step_size": ("step", "exponential"),
    "d_model": ("noam",),
    "decay_rate": ("noam_hold",),
    "timescale": ("inverse_sqrt",),
    "decay_steps": ("wsd",),
    "decay_shape": ("wsd",),
}
"""The decay styles that use each argument; a warmup style is used wherever there is a warmup."""
