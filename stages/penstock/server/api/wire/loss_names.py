"""Losses as other clients name them, to those that are computed here.

What has no counterpart is refused by name: a loss that is nearly the one that was asked for is not
computed in its place.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.server.api.errors import ApiError
from penstock.server.protocol.losses import PARAMS
from penstock.server.protocol.types import Loss


@dataclass(frozen=True)
class Chosen:
    """A loss and its numbers."""

    loss: Loss
    params: dict[str, float]


@dataclass(frozen=True)
class _Foreign:
    """A loss of xorl's: what it is here, what its numbers are called here, and its own defaults."""

    loss: Loss
    clip: tuple[float, float] | None = None
    """`eps_clip` and `eps_clip_high` where they are not given."""
    renamed: Mapping[str, str] | None = None
    neutral: Mapping[str, tuple[Any, ...]] | None = None
    """Numbers that are taken at values with which they do nothing."""


LOSSES: Mapping[str, Loss] = {loss: loss for loss in PARAMS}
"""By their names."""

_OFF = (None, False, 0, 0.0)
_DRGRPO = _Foreign(
    "drgrpo", clip=(0.2, 0.28), renamed={"beta": "kl_beta"}, neutral={"kl_type": ("k3", None)}
)

XORL: Mapping[str, _Foreign] = {
    "causallm_loss": _Foreign("cross_entropy"),
    "policy_loss": _Foreign(
        "ppo",
        clip=(0.2, 0.2),
        renamed={"eps_clip_c": "eps_clip_c"},
        neutral={"use_tis": _OFF, "icepop_beta": _OFF, "compute_kl_stats": _OFF},
    ),
    "cispo": _Foreign("cispo", clip=(1.0, 3.0)),
    "drgrpo": _DRGRPO,
    "drgrpo_loss": _DRGRPO,
}
"""By their names there. Clips there are distances from 1; here they are thresholds."""


def choose(name: str, params: Mapping[str, Any]) -> Chosen:
    """A loss of the SDK, and its numbers. Raises Refusal for what is not known of it."""
    loss = LOSSES.get(name)
    if loss is None:
        raise ApiError(
            f"there is no loss {name[:100]!r} here; there are {', '.join(sorted(PARAMS))}"
        )
    known = PARAMS[loss]
    strange = sorted(key for key in params if key not in known)
    if strange:
        raise ApiError(
            f"{name} takes no {', '.join(key[:100] for key in strange[:5])};"
            f" it takes {', '.join(known) or 'no numbers'}"
        )
    return Chosen(loss, {key: _number(key, value) for key, value in params.items()})


def xorl_loss(name: str, params: Mapping[str, Any]) -> Chosen:
    """A loss by xorl's name for it, or else by the SDK's."""
    foreign = XORL.get(name)
    if foreign is None:
        return choose(name, params)
    left = dict(params)
    for key, fine in (foreign.neutral or {}).items():
        if (given := left.pop(key, None)) is not None and given not in fine:
            raise ApiError(f"{name} with {key} {str(given)[:50]!r} is not computed here")
    for there, here in (foreign.renamed or {}).items():
        if (given := left.pop(there, None)) is not None:
            left[here] = given
    _clip(foreign, left)
    return choose(foreign.loss, left)


def _clip(foreign: _Foreign, params: dict[str, Any]) -> None:
    """Distances from 1 become thresholds; there are its own defaults where none are given."""
    if foreign.clip is None:
        return
    given = [params.pop(key, None) for key in ("eps_clip", "eps_clip_low", "eps_clip_high")]
    both, low, high = (None if x is None else _number("eps_clip", x) for x in given)
    below = next(x for x in (low, both, foreign.clip[0]) if x is not None)
    above = next(x for x in (high, both, foreign.clip[1]) if x is not None)
    params.setdefault("clip_low_threshold", 1.0 - below)
    params.setdefault("clip_high_threshold", 1.0 + above)


def _number(key: str, value: Any) -> float:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if not plain or abs(value) > 1e30 or not math.isfinite(value):
        raise ApiError(f"{key[:100]} is {str(value)[:50]!r}, and is to be a finite number")
    return float(value)
