"""The learning rate at each step: warmup, then constant, linear or cosine."""

import math
from typing import Literal

DecayStyle = Literal["constant", "linear", "cosine"]


def lr_at(
    step: int,
    total_steps: int,
    *,
    lr: float,
    lr_start: float = 0.0,
    lr_min: float = 0.0,
    warmup_ratio: float = 0.0,
    decay_style: DecayStyle = "constant",
    decay_ratio: float = 1.0,
) -> float:
    """The learning rate of optimizer step `step`, counted from 0.

    With w = int(total_steps * warmup_ratio) and d = int(total_steps * decay_ratio): linearly from
    lr_start (which the very first step uses) to lr over w steps; then, with p = (s-w)/(d-w),
    `linear` is lr_min + (lr-lr_min)(1-p), `cosine` is lr_min + (lr-lr_min)(1+cos(pi p))/2, and from
    step d on both stay at lr_min; `constant` stays at lr.
    """
    warmup = int(total_steps * warmup_ratio)
    if step < warmup:
        return lr_start + (lr - lr_start) * step / warmup
    if decay_style == "constant":
        return lr
    end = int(total_steps * decay_ratio)
    if step >= end:
        return lr_min
    progress = (step - warmup) / max(1, end - warmup)
    share = 1 - progress if decay_style == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return lr_min + (lr - lr_min) * share
