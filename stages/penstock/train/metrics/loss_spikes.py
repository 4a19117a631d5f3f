"""Losses that stand out of those before them."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import NamedTuple

from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.non_finite import named, packed_row_numbers
from penstock.engine.train_step import StepResult
from penstock.rows.collate import MicroBatch

REMEMBERED = 100
"""Steps that a loss is compared with."""
ENOUGH = 20
"""Steps that must have been seen before any loss stands out."""
DEVIATIONS_PER_DISTANCE = 1.4826
"""Standard deviations of a normal distribution in one median distance from its median."""
LEAST = 0.02
"""A standard deviation counts as this share of the median, at least: where losses hardly move, no
small change stands out."""
LEAST_OF_START = 0.01
"""And as this share of the median of the first losses: near zero, where data are learnt by heart,
losses of single rows are many times their median and mean nothing."""


@dataclass(frozen=True)
class Spike:
    """A loss that stands out."""

    loss: float
    usual: float
    deviations: float
    """How far it is above the usual, in standard deviations."""

    def as_json(self) -> dict[str, float]:
        """As plain values."""
        return asdict(self)


class Traced(NamedTuple):
    """A spike, and where it came from in words."""

    spike: Spike
    text: str


class LossWatch:
    """Sees the loss of every step; the same on every rank.

    Medians are what others are compared with, so that one spike neither hides the next nor makes
    the losses after it look low, and a run that stays on higher ground is soon at home there.
    """

    def __init__(self, threshold: float) -> None:
        """`threshold` in standard deviations; with 0 nothing stands out."""
        self._threshold = threshold
        self._seen: deque[float] = deque(maxlen=REMEMBERED)
        self._start: float | None = None
        self._is_up = False

    def see(self, loss: float) -> Spike | None:
        """The spike that begins with this loss; None if it is usual, or as high as the last one."""
        seen = self._seen
        found: Spike | None = None
        if self._threshold and len(seen) >= ENOUGH:
            usual = median(seen)
            distance = median(abs(one - usual) for one in seen)
            self._start = abs(usual) if self._start is None else self._start
            least = max(LEAST * abs(usual), LEAST_OF_START * self._start, 1e-12)
            deviation = max(DEVIATIONS_PER_DISTANCE * distance, least)
            above = (loss - usual) / deviation
            if above >= self._threshold:
                found = Spike(loss, usual, above)
        if math.isfinite(loss):
            seen.append(loss)
        begins, self._is_up = not self._is_up, found is not None
        return found if begins else None


@dataclass(frozen=True)
class RankLoss:
    """What one rank had of a step."""

    rank: int
    rows: tuple[int, ...]
    """Packed rows, those of the whole micro-batches that it shares."""
    share: float
    """Its part of the step's loss."""
    trained: int
    """Trained tokens of these rows."""


def highest_loss_rank(portions: Sequence[RankLoss]) -> tuple[list[int], tuple[int, ...], float]:
    """The ranks whose rows had the largest mean loss, these rows, and that mean, as a multiple of
    the whole step's. Ranks that share rows are one."""
    together: dict[tuple[int, ...], list[RankLoss]] = {}
    for each in portions:
        together.setdefault(each.rows, []).append(each)
    total = math.fsum(each.share for each in portions)
    trained = sum(several[0].trained for several in together.values())

    def mean(several: Sequence[RankLoss]) -> float:
        return math.fsum(each.share for each in several) / max(1, several[0].trained)

    rows, most = max(together.items(), key=lambda each: mean(each[1]))
    whole = total / max(1, trained)
    return [each.rank for each in most], rows, mean(most) / whole if whole else 1.0


class SpikeWatch:
    """Sees every step, on every rank, and says where a spike came from."""

    def __init__(self, threshold: float, ranks: ProcessInfo) -> None:
        """`threshold` as `LossWatch` has it."""
        self._losses, self._ranks = LossWatch(threshold), ranks

    def see(self, result: StepResult, batches: Sequence[MicroBatch]) -> Traced | None:
        """What to warn of after a step over `batches` of this rank; on all ranks the same."""
        spike = self._losses.see(result.loss)
        if spike is None:
            return None
        trained = sum(batch.num_trained for batch in batches)
        mine = RankLoss(self._ranks.rank, packed_row_numbers(batches), result.share.item(), trained)
        ranks, rows, times = highest_loss_rank(self._ranks.gather(mine))
        text = (
            f"the loss is {spike.loss:.4g}, {spike.deviations:.1f} standard deviations above "
            f"{spike.usual:.4g}, the median of the steps before it; highest on rank(s) "
            f"{', '.join(map(str, ranks))}, {times:.2f} times the mean, with packed row(s) "
            f"{named(rows)}"
        )
        return Traced(spike, text)
