"""Learning rate schedules: warmup, optional hold, then decay.

s is the step, from 0, and N the number of steps; W warmup steps, H hold steps, and E the step at
which the decay has ended. The decay progress p goes from 0 at W + H to 1 at E.
"""

import math
from dataclasses import dataclass

from penstock.config.schema.optimizer import ENDING, OptimConfig

# Default timescale of `inverse_sqrt` without warmup: steps until the rate falls to about 0.7.
DEFAULT_TIMESCALE = 10_000


@dataclass(frozen=True)
class _SchedulePoint:
    """A step's position in the schedule; the names are those of the module docstring."""

    s: int
    N: int
    W: int
    H: int
    E: int

    @property
    def decay_steps(self) -> int:
        return self.s - self.W - self.H

    @property
    def p(self) -> float:
        return min(1.0, self.decay_steps / max(1, self.E - self.W - self.H))


def lr_at(step: int, total_steps: int, optim: OptimConfig) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Warmup is linear: with `zero_start`, lr_start + (lr - lr_start) s/W, so the first step uses
    lr_start; with `plus_one`, (s+1)/(W+1) replaces s/W. Step W uses lr, and so do the H hold steps
    after it. Then:

    - `constant`: lr
    - `linear`: m + (lr-m)(1-p), with m = lr_min
    - `cosine`: m + (lr-m)(1 + cos(2 pi p num_cycles))/2; num_cycles 0.5 is one descent
    - `polynomial`: m + (lr-m)(1-p)^power
    - `wsd` (warmup, stable, decay; Hu et al. 2024, "MiniCPM"): lr until `decay_steps` before E, and
      then decay to m: `linear`, `cosine`, or `sqrt`, 1 - sqrt of the progress (Haegele et al. 2024)
    - `square`: lr (1-p)^2, `sqrt`: lr sqrt(1 - s/E), `inverse_sqrt`: lr sqrt(t/(s-W-H+t)), with t
      the `timescale`, by default the warmup steps
    - `noam` (Vaswani et al. 2017): lr d_model^-0.5 min(s^-0.5, s W^-1.5), warmup included
    - `noam_hold`: lr (W/(s-H))^decay_rate
    - `step`: lr gamma^floor((s-W-H)/step_size), `exponential`: the same without floor

    The seven from `square` on are never below m. Schedules with an end use m from step E on. E is
    int(N decay_ratio) - constant_steps, and W, if it is set as a ratio of N, is rounded down.
    """
    style, more = optim.lr_decay_style, optim.lr_schedule_kwargs
    warmup = optim.warmup_steps(total_steps)
    if style == "noam":
        s, peak = max(1, step), optim.lr / math.sqrt(more.d_model)
        return peak * s * warmup**-1.5 if s <= warmup else max(optim.lr_min, peak / math.sqrt(s))
    if warmup and step <= warmup:
        ahead = _plus_one(optim)
        return optim.lr_start + (optim.lr - optim.lr_start) * (step + ahead) / (warmup + ahead)
    end = int(total_steps * optim.lr_decay_ratio) - more.constant_steps
    if style in ENDING and step >= end:
        return optim.lr_min
    if step < warmup + more.hold_steps:
        return optim.lr
    point = _SchedulePoint(step, total_steps, warmup, more.hold_steps, end)
    match style:
        case "constant":
            return optim.lr
        case "linear":
            return _interpolate(optim, 1 - point.p)
        case "cosine":
            return _interpolate(optim, _cosine(point.p, more.num_cycles))
        case "polynomial":
            return _interpolate(optim, (1 - point.p) ** more.power)
        case "wsd":
            return _wsd(point, optim)
        case _:
            return max(optim.lr_min, optim.lr * _decaying_share(style, point, optim))


def depends_on_length(optim: OptimConfig) -> bool:
    """Whether the learning rate of a step may depend on the number of steps."""
    by_ratio = optim.lr_warmup_steps is None and optim.lr_warmup_ratio > 0
    return by_ratio or optim.lr_decay_style in ENDING


def _plus_one(optim: OptimConfig) -> int:
    return 1 if optim.lr_schedule_kwargs.warmup_style == "plus_one" else 0


def _interpolate(optim: OptimConfig, share: float) -> float:
    return optim.lr_min + (optim.lr - optim.lr_min) * share


def _cosine(progress: float, cycles: float) -> float:
    return (1 + math.cos(2 * math.pi * cycles * progress)) / 2


def _wsd(point: _SchedulePoint, optim: OptimConfig) -> float:
    more = optim.lr_schedule_kwargs
    steps = point.N // 10 if more.decay_steps is None else more.decay_steps
    decay_start = point.E - steps
    if point.s < decay_start:
        return optim.lr
    progress = (point.s - decay_start) / max(1, steps)
    shares = {
        "linear": 1 - progress,
        "cosine": _cosine(progress, more.num_cycles),
        "sqrt": 1 - math.sqrt(progress),
    }
    return _interpolate(optim, shares[more.decay_shape])


def _decaying_share(style: str, point: _SchedulePoint, optim: OptimConfig) -> float:
    """The share of `lr` in the styles that end at or above `lr_min`."""
    more, steps = optim.lr_schedule_kwargs, point.decay_steps
    match style:
        case "square":
            return (1 - point.p) ** 2
        case "sqrt":
            return math.sqrt(1 - point.s / point.E)
        case "inverse_sqrt":
            scale = more.timescale or point.W + _plus_one(optim) or DEFAULT_TIMESCALE
            return math.sqrt(scale / (steps + scale))
        case "noam_hold":
            scale = max(1, point.W)
            return (scale / (steps + scale)) ** more.decay_rate
        case "step":
            return more.gamma ** (steps // more.step_size)
        case _:
            assert style == "exponential"
            return more.gamma ** (steps / more.step_size)
