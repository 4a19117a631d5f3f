"""Step timers: duration of each phase of a step, from the rank's heartbeat.

On a GPU, kernels run asynchronously, so CUDA events on the stream are timed. They are read once the
step's loss is known, without further synchronization.
"""

import time
from collections import defaultdict
from typing import Any

import torch

from penstock.core.process.rank_heartbeat import RankStatus

PHASE_NAMES = {"reading rows": "data", "waiting for other stages": "bubble", "update": "optimizer"}
"""Names of phases in the metrics, where they differ."""

BETWEEN = "between"
"""Time between two steps that is not covered by a named phase."""

COMMUNICATION = "communication"
"""Collective operations within other phases. On a GPU they are not timed separately, and FSDP
collectives never are."""


class PhaseTimer:
    """Receives the heartbeats of a rank."""

    def __init__(self, device: torch.device) -> None:
        self._clock: Any = _CudaClock() if device.type == "cuda" else _CpuClock()
        self._phase, self._is_waiting = BETWEEN, False
        self._marks: list[tuple[str, bool, Any]] = [(BETWEEN, False, self._clock.mark())]

    def on_phase(self, beat: RankStatus) -> None:
        """Record the time if a phase begins."""
        phase, is_waiting = PHASE_NAMES.get(beat.phase, beat.phase.replace(" ", "_")), beat.waiting
        if (phase, is_waiting) == (self._phase, self._is_waiting):
            return
        self._phase, self._is_waiting = phase, is_waiting
        if not is_waiting or self._clock.times_collectives:
            self._marks.append((phase, is_waiting, self._clock.mark()))

    def pop_seconds(self) -> dict[str, float]:
        """Seconds of each phase since the last call. The device must be synchronized."""
        last = self._clock.mark()
        self._clock.synchronize(last)
        totals: dict[str, float] = defaultdict(float)
        ends = [*(mark for _, _, mark in self._marks[1:]), last]
        for (phase, is_waiting, start), end in zip(self._marks, ends, strict=True):
            seconds = self._clock.elapsed(start, end)
            totals[phase] += seconds
            if is_waiting:
                totals[COMMUNICATION] += seconds
        self._phase, self._is_waiting = BETWEEN, False
        self._marks = [(BETWEEN, False, last)]
        return {phase: round(seconds, 6) for phase, seconds in totals.items()}


class _CpuClock:
    times_collectives = True

    def mark(self) -> float:
        return time.perf_counter()

    def synchronize(self, _last: object) -> None:
        """Nothing to wait for on the CPU."""

    def elapsed(self, start: float, end: float) -> float:
        return end - start


class _CudaClock:
    times_collectives = False

    def mark(self) -> torch.cuda.Event:
        # Without enable_timing an event only orders kernels, and has no time.
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def synchronize(self, last: torch.cuda.Event) -> None:
        last.synchronize()

    def elapsed(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1000
