"""How long the phases of a step take, from what a rank tells of itself anyway.

On a GPU the host runs ahead of the work, so there the time between events on its stream is taken;
it is read when a step's loss is known, and waits for nothing more.
"""

import time
from collections import defaultdict
from typing import Any

import torch

from penstock.core.process.rank_heartbeat import RankStatus

NAMES = {
    "reading rows": "data",
    "waiting for other stages": "bubble",
    "update": "optimizer",
}
"""What phases are called in the metrics, where that is not their own name."""

BETWEEN = "between"
"""From the end of one step to the beginning of the next, but for what has a name."""

WAITING = "communication"
"""Operations that end when other ranks have come as far, within the others. On a GPU they are not
told apart, nor are those that shard weights and gradients anywhere."""


class Phases:
    """Hears a rank's pulse."""

    def __init__(self, device: torch.device) -> None:
        self._clock: Any = _Events() if device.type == "cuda" else _Seconds()
        self._phase, self._waits = BETWEEN, False
        self._marks: list[tuple[str, bool, Any]] = [(BETWEEN, False, self._clock.mark())]

    def hear(self, beat: RankStatus) -> None:
        """Take the time if this begins anything."""
        phase, waits = NAMES.get(beat.phase, beat.phase.replace(" ", "_")), beat.waiting
        if (phase, waits) == (self._phase, self._waits):
            return
        self._phase, self._waits = phase, waits
        if not waits or self._clock.sees_waiting:
            self._marks.append((phase, waits, self._clock.mark()))

    def take(self) -> dict[str, float]:
        """Seconds of each phase since this was last asked. The device must have done its work."""
        last = self._clock.mark()
        self._clock.settle(last)
        found: dict[str, float] = defaultdict(float)
        ends = [*(mark for _, _, mark in self._marks[1:]), last]
        for (phase, waits, start), end in zip(self._marks, ends, strict=True):
            seconds = self._clock.between(start, end)
            found[phase] += seconds
            if waits:
                found[WAITING] += seconds
        self._phase, self._waits = BETWEEN, False
        self._marks = [(BETWEEN, False, last)]
        return {phase: round(seconds, 6) for phase, seconds in found.items()}


class _Seconds:
    sees_waiting = True

    def mark(self) -> float:
        return time.perf_counter()

    def settle(self, _last: object) -> None:
        """There is nothing to wait for."""

    def between(self, start: float, end: float) -> float:
        return end - start


class _Events:
    sees_waiting = False

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self, last: torch.cuda.Event) -> None:
        last.synchronize()

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1000
