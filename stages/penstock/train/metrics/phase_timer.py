"""Step timers: duration of each phase of a step, from the rank's heartbeat.

On a GPU, kernels run asynchronously, so CUDA events on the stream are timed. They are read once the
step's loss is known, without further synchronization.
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
"""Names of phases in the metrics, where they differ."""

BETWEEN = "between"
"""Time between two steps that is not covered by a named phase."""

WAITING = "communication"
"""Collective operations within other phases. On a GPU they are not timed separately, and FSDP
collectives never are."""


class Phases:
    """Receives the heartbeats of a rank."""

    def __init__(self, device: torch.device) -> None:
        self._clock: Any = _Events() if device.type == "cuda" else _Seconds()
        self._phase, self._waits = BETWEEN, False
        self._marks: list[tuple[str, bool, Any]] = [(BETWEEN, False, self._clock.mark())]

    def on_phase(self, beat: RankStatus) -> None:
        """Record the time if a phase begins."""
        phase, waits = NAMES.get(beat.phase, beat.phase.replace(" ", "_")), beat.waiting
        if (phase, waits) == (self._phase, self._waits):
            return
        self._phase, self._waits = phase, waits
        if not waits or self._clock.sees_waiting:
            self._marks.append((phase, waits, self._clock.mark()))

    def pop_seconds(self) -> dict[str, float]:
        """Seconds of each phase since the last call. The device must be synchronized."""
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
        """Nothing to wait for on the CPU."""

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
