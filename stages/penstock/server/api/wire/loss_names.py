"""Loss names of other APIs, mapped to the losses implemented here. A loss without an exact
counterpart is rejected by name and never replaced by a similar one."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.server.api.errors import ApiError
from penstock.server.protocol.losses import PARAMS, params_fault
from penstock.server.protocol.types import Loss


@dataclass(frozen=True)
class LossSpec:
    """A loss and its parameters."""

    loss: Loss
    params: dict[str, float]


@dataclass(frozen=True)
class _XorlLoss:
    """An xorl loss: its name here, the names of its parameters here, and its defaults."""

    loss: Loss
    clip: tuple[float, float] | None = None  # `eps_clip` and `eps_clip_high` if not given
    renamed: Mapping[str, str] | None = None
    neutral: Mapping[str, tuple[Any, ...]] | None = None
    """Parameters that are only accepted at values with no effect."""


LOSSES: Mapping[str, Loss] = {loss: loss for loss in PARAMS}  # SDK losses by name
_OFF = (None, False, 0, 0.0)
_DRGRPO = _XorlLoss(
    "drgrpo", clip=(0.2, 0.28), renamed={"beta": "kl_beta"}, neutral={"kl_type": ("k3", None)}
)

# xorl losses by name. xorl's clip parameters are distances from 1; here they are thresholds.
XORL: Mapping[str, _XorlLoss] = {
    "causallm_loss": _XorlLoss("cross_entropy"),
    "policy_loss": _XorlLoss(
        "ppo",
        clip=(0.2, 0.2),
        renamed={"eps_clip_c": "eps_clip_c"},
        neutral={"use_tis": _OFF, "icepop_beta": _OFF, "compute_kl_stats": _OFF},
    ),
    "cispo": _XorlLoss("cispo", clip=(1.0, 3.0)),
    "drgrpo": _DRGRPO,
    "drgrpo_loss": _DRGRPO,
}


def resolve_loss(name: str, params: Mapping[str, Any]) -> LossSpec:
    """Look up an SDK loss and its parameters. Raises ApiError if unknown."""
    loss = LOSSES.get(name)
    if loss is None:
        raise ApiError(
            f"there is no loss {name[:100]!r} here; there are {', '.join(sorted(PARAMS))}"
        )
    if fault := params_fault(loss, params):
        raise ApiError(fault)
    return LossSpec(loss, {key: _number(key, value) for key, value in params.items()})


def resolve_xorl_loss(name: str, params: Mapping[str, Any]) -> LossSpec:
    """Look up a loss by its xorl name, else by its SDK name."""
    foreign = XORL.get(name)
    if foreign is None:
        return resolve_loss(name, params)
    remaining = dict(params)
    for key, fine in (foreign.neutral or {}).items():
        if (value := remaining.pop(key, None)) is not None and value not in fine:
            raise ApiError(f"{name} with {key} {str(value)[:50]!r} is not computed here")
    for foreign_name, native_name in (foreign.renamed or {}).items():
        if (value := remaining.pop(foreign_name, None)) is not None:
            remaining[native_name] = value
    _clip(foreign, remaining)
    return resolve_loss(foreign.loss, remaining)


def _clip(foreign: _XorlLoss, params: dict[str, Any]) -> None:
    """Convert distances from 1 to thresholds; uses the loss's defaults if none are given."""
    if foreign.clip is None:
        return
    bounds = [params.pop(key, None) for key in ("eps_clip", "eps_clip_low", "eps_clip_high")]
    symmetric, low, high = (None if x is None else _number("eps_clip", x) for x in bounds)
    below = next(x for x in (low, symmetric, foreign.clip[0]) if x is not None)
    above = next(x for x in (high, symmetric, foreign.clip[1]) if x is not None)
    params.setdefault("clip_low_threshold", 1.0 - below)
    params.setdefault("clip_high_threshold", 1.0 + above)


def _number(key: str, value: Any) -> float:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    # The size first: isfinite raises OverflowError for an integer beyond the range of floats.
    if not plain or abs(value) > 1e30 or not math.isfinite(value):
        raise ApiError(f"{key[:100]} is {str(value)[:50]!r}, and is to be a finite number")
    return float(value)
