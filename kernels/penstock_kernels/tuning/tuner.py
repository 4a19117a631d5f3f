"""Selects the fastest of a few candidates on this device, measured once."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from penstock_kernels.tuning.autotune_cache import AutotuneCache, AutotuneKey, Choice

Candidate = TypeVar("Candidate", bound=tuple[int, ...])

Measure = Callable[[Sequence[Callable[[], Any]]], list[float]]
"""Candidates to their microseconds; infinity for those that the device cannot run."""

# A candidate is preferred to the first one only if it takes less than this fraction of its time:
# measurements vary by a few per cent.
MIN_IMPROVEMENT = 0.97


def size_class(sizes: Sequence[int]) -> str:
    """Sizes rounded up to powers of two: the result for one size is used for the others."""
    return "x".join(str(1 << max(size - 1, 0).bit_length()) for size in sizes)


class Autotuner:
    """The choices of one process for one device."""

    def __init__(self, cache: AutotuneCache, measure: Measure) -> None:
        self._cache, self._measure = cache, measure
        self._known: dict[tuple[Any, ...], Any] = {}

    def choose(
        self,
        key: AutotuneKey,
        candidates: Sequence[Candidate],
        run: Callable[[Candidate], Any],
        *,
        may_measure: bool = True,
    ) -> Candidate:
        """The fastest of `candidates`; the first one is used without measurement.

        `run` launches a candidate, possibly repeatedly.
        """
        known_key = key, candidates[0]
        # Every launch asks: only the first reads the file.
        if (remembered := self._known.get(known_key)) is not None:
            return remembered
        # The rule's choice is part of the key: others are measured against it.
        rule_key = key._replace(inputs=f"{key.inputs} {_name(candidates[0])}")
        candidate = _among(candidates, self._cache.find(rule_key))
        if candidate is None and not may_measure:
            return candidates[0]
        if candidate is None:
            candidate = self._measured(rule_key, candidates, run)
        if candidate is None:
            # Another process measures; its choice is in the file at a later launch.
            return candidates[0]
        self._known[known_key] = candidate
        return candidate

    def _measured(
        self,
        rule_key: AutotuneKey,
        candidates: Sequence[Candidate],
        run: Callable[[Candidate], Any],
    ) -> Candidate | None:
        """The fastest candidate; None if another process is measuring."""
        with self._cache.lock() as is_alone:
            # Another process may have measured since the file was read.
            measured = _among(candidates, self._cache.find(rule_key))
            if measured is not None or not is_alone:
                return measured
            works = [lambda candidate=candidate: run(candidate) for candidate in candidates]
            times = self._measure(works)
            best = min(range(len(times)), key=times.__getitem__)
            chosen = candidates[best if times[best] < MIN_IMPROVEMENT * times[0] else 0]
            durations = {
                _name(candidate): round(time, 2)
                for candidate, time in zip(candidates, times, strict=True)
                if time < math.inf
            }
            self._cache.add(rule_key, chosen, durations)
            return chosen


def _name(candidate: tuple[int, ...]) -> str:
    return "/".join(map(str, candidate))


def _among(candidates: Sequence[Candidate], choice: Choice | None) -> Candidate | None:
    return next(
        (candidate for candidate in candidates if choice is not None and list(candidate) == choice),
        None,
    )
