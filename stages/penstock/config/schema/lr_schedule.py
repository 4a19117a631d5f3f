"""What some of the learning rate's ways down are told besides."""

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
    """More about the learning rate's schedule: of use with some styles of warmup and decay, and
    refused with others. Numbers of steps are of the optimizer's."""

    warmup_style: Literal["zero_start", "plus_one"] = "zero_start"
    """`zero_start`: step s of W has the share s/W, so that the very first step learns at
    `lr_start`. `plus_one`: (s+1)/(W+1)."""

    hold_steps: int = Field(default=0, ge=0)
    """Steps at the peak between warmup and decay."""

    constant_steps: int = Field(default=0, ge=0)
    """Steps at `lr_min` at the end: the decay is over by so many steps earlier."""

    num_cycles: float = Field(default=0.5, gt=0)
    """Waves of a cosine from its begin to its end; at 0.5 it goes down once."""

    power: float = Field(default=1.0, gt=0)
    """Of `polynomial`: 1 is a line, 2 falls fast first."""

    gamma: float = Field(default=0.1, gt=0, le=1)
    """What `step` and `exponential` multiply the rate by, every `step_size` steps."""

    step_size: int = Field(default=1, gt=0)
    """Steps of a stair of `step`, or in which `exponential` has fallen by `gamma`."""

    d_model: int = Field(default=1, gt=0)
    """Of `noam`: the model's width, by whose root the rate is divided."""

    decay_rate: float = Field(default=0.5, gt=0)
    """Of `noam_hold`: the power of W/s; 0.5 falls with the root of the steps."""

    timescale: int | None = Field(default=None, gt=0)
    """Of `inverse_sqrt`: steps in which the rate falls to about 0.7. Unset: those of the warmup, or
    10,000 without one."""

    decay_steps: int | None = Field(default=None, ge=0)
    """Of `wsd`: steps of its decay. Unset: a tenth of all."""

    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """Of `wsd`: how it decays. `sqrt` is 1 - sqrt(p): fast first."""


ENDING: tuple[DecayStyle, ...] = ("linear", "cosine", "polynomial", "wsd", "square", "sqrt")
"""The styles that have come to `lr_min` at a step that is known; the others fall on."""

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
"""The styles of decay that read each; a style of warmup is read wherever there is a warmup."""
