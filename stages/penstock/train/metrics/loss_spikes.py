"""Loss-spike detection."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.non_finite import format_rows, packed_row_numbers
from penstock.engine.train_step import StepResult
from penstock.rows.collate import MicroBatch

WINDOW_STEPS = 100
"""Window size in steps."""
MIN_STEPS = 20
"""Minimum number of steps before detection starts."""
STD_PER_MAD = 1.4826
"""Ratio of the standard deviation of a normal distribution to its median absolute deviation (MAD):
1 / Phi^-1(3/4)."""
# Lower bound of the standard deviation as a fraction of the median: a flat loss has next to none,
# and any small change of it would be a spike.
MIN_RELATIVE_STD = 0.02
# Lower bound as a fraction of the median of the first losses: near zero, on memorized data, the
# loss of single rows is many times the median without significance.
MIN_STD_OF_INITIAL_LOSS = 0.01


@dataclass(frozen=True)
class Spike:
    """A loss spike."""

    loss: float
    median: float
    deviations: float
    """Distance above the median, in standard deviations."""

    def as_json(self) -> dict[str, float]:
        """As plain values; `usual` is the name of the median in metrics.jsonl."""
        return {"loss": self.loss, "usual": self.median, "deviations": self.deviations}


class SpikeWarning(NamedTuple):
    """A spike and a description of its cause."""

    spike: Spike
    text: str


class LossSpikeDetector:
    """Receives the loss of every step; the same on every rank.

    Uses medians, so that one spike neither hides the next one nor makes later losses look low, and
    so that a lasting increase soon becomes the baseline.
    """

    def __init__(self, threshold: float) -> None:
        """`threshold` in standard deviations; 0 disables detection."""
        self._threshold = threshold
        self._recent_losses: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._initial_median: float | None = None
        self._is_spiking = False

    def update(self, loss: float | None) -> Spike | None:
        """The spike that starts with this loss; None if the loss is normal, or as high as the
        previous one, or the step has none."""
        if loss is None:
            return None
        losses = self._recent_losses
        spike: Spike | None = None
        if self._threshold and len(losses) >= MIN_STEPS:
            usual = median(losses)
            distance = median(abs(value - usual) for value in losses)
            self._initial_median = (
                abs(usual) if self._initial_median is None else self._initial_median
            )
            min_deviation = max(
                MIN_RELATIVE_STD * abs(usual), MIN_STD_OF_INITIAL_LOSS * self._initial_median, 1e-12
            )
            deviation = max(STD_PER_MAD * distance, min_deviation)
            above = (loss - usual) / deviation
            if above >= self._threshold:
                spike = Spike(loss, usual, above)
        if math.isfinite(loss):
            losses.append(loss)
        is_first, self._is_spiking = not self._is_spiking, spike is not None
        return spike if is_first else None


@dataclass(frozen=True)
class RankLoss:
    """One rank's part of a step."""

    rank: int
    rows: tuple[int, ...]
    """Packed rows of the complete micro-batches that this rank shares."""
    loss: float
    """This rank's part of the step's loss."""
    loss_weight: float
    """Sum of the loss weights of these rows' tokens."""


def highest_loss_rank(rank_losses: Sequence[RankLoss]) -> tuple[list[int], tuple[int, ...], float]:
    """The ranks whose rows have the highest mean loss, these rows, and that mean relative to the
    step's mean. Ranks that share rows are grouped."""
    by_rows: dict[tuple[int, ...], list[RankLoss]] = {}
    for rank_loss in rank_losses:
        by_rows.setdefault(rank_loss.rows, []).append(rank_loss)
    # fsum rounds once, so the order of summands does not matter.
    total = math.fsum(rank_loss.loss for rank_loss in rank_losses)
    weight = math.fsum(sharing[0].loss_weight for sharing in by_rows.values())

    def mean(sharing: Sequence[RankLoss]) -> float:
        return math.fsum(part.loss for part in sharing) / (sharing[0].loss_weight or 1)

    rows, highest = max(by_rows.items(), key=lambda item: mean(item[1]))
    step_mean = total / (weight or 1)
    return [part.rank for part in highest], rows, mean(highest) / step_mean if step_mean else 1.0


class LossSpikeMonitor:
    """Receives every step on every rank, and locates the origin of a spike."""

    def __init__(self, threshold: float, ranks: ProcessInfo) -> None:
        """`threshold` as in `LossSpikeDetector`."""
        self._detector, self._ranks = LossSpikeDetector(threshold), ranks

    def update(self, result: StepResult, batches: Sequence[MicroBatch]) -> SpikeWarning | None:
        """The warning after a step over this rank's `batches`; the same on all ranks."""
        spike = self._detector.update(result.loss)
        if spike is None:
            return None
        weight = math.fsum(batch.loss_weight for batch in batches)
        rank_loss = RankLoss(
            self._ranks.rank, packed_row_numbers(batches), result.local_loss.item(), weight
        )
        ranks, rows, times = highest_loss_rank(self._ranks.all_gather(rank_loss))
        text = (
            f"the loss is {spike.loss:.4g}, {spike.deviations:.1f} standard deviations above "
            f"{spike.median:.4g}, the median of the steps before it; highest on rank(s) "
            f"{', '.join(map(str, ranks))}, {times:.2f} times the mean, with packed row(s) "
            f"{format_rows(rows)}"
        )
        return SpikeWarning(spike, text)
