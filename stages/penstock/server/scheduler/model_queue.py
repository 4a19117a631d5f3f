"""Request queue of one model: the next request, and outcomes of completed ones.

Requests with sequence numbers run in that order, each once. Requests without one run after those
that arrived before them. The clock is passed in.
"""

import itertools
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import get_args

from penstock.server.protocol.requests import Ordered
from penstock.server.scheduler.errors import RequestError
from penstock.server.scheduler.state_store import CompletedRequest, QueueState
from penstock.server.scheduler.task import Outcome, Task, outcome_num_bytes, to_outcome, told

FIRST = 1
"""Sequence number of the first request of a model."""

KEPT = 64
"""Outcomes kept per model for repeated requests."""

KEPT_BYTES = 16 << 20
"""Maximum bytes of outcomes; the oldest are dropped beyond it."""

SETTLING = 1.0
"""Seconds in which lower sequence numbers may still arrive before the lowest present one is taken
as the next, if the next number is unknown."""

_KINDS = {kind.__name__: kind for kind in get_args(Ordered)}


@dataclass(frozen=True)
class _Kept:
    kind: type
    outcome: Outcome
    bytes: int


class ModelQueue:
    """The queue of one model."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.running: Task | None = None
        self.stalled_since: float | None = None
        """Since when requests wait for a missing sequence number."""
        self._next = FIRST
        self._is_sure = True
        """Whether the next number must be `_next`; otherwise requests with lower numbers may have
        been lost with the API process."""
        self._numbered: dict[int, Task] = {}
        self._others: deque[Task] = deque()
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._kept_bytes = 0

    def __len__(self) -> int:
        """Number of waiting requests that are still to run."""
        return sum(1 for errand in self.waiting() if errand.outcome is None)

    def waiting(self) -> list[Task]:
        """All requests that have not started."""
        return [*self._numbered.values(), *self._others]

    def put(self, errand: Task) -> Task | Outcome:
        """Add a request. Returns its task, which is an existing one if the sequence number is
        known; or the outcome of that.

        Raises RequestError if the number belongs to another request, or its outcome was dropped.
        """
        seq = errand.seq
        if seq is None:
            self._others.append(errand)
            return errand
        if seq in self._kept:
            self._check_kind(errand, self._kept[seq].kind)
            return self._kept[seq].outcome
        known = self._numbered.get(seq)
        if known is None and self.running is not None and self.running.seq == seq:
            known = self.running
        if known is not None:
            self._check_kind(errand, type(known.work))
            if known.outcome is not None:
                return known.outcome
            known.asks += errand.asks
            return known
        if seq < self._next and (self._kept or self._next > FIRST):
            raise RequestError(
                "gone",
                f"number {seq} of model {self.model} is past, and how it ended is not kept any"
                f" more; the next is {self._next}.\n  Go on with higher numbers.",
            )
        self._numbered[seq] = errand
        return errand

    def candidate(self) -> Task | None:
        """The next request, if it may start now."""
        if self.running is not None:
            return None
        if self._others:
            first = self._others[0]
            if all(errand.arrived > first.arrived for errand in self._numbered.values()):
                return first
        if not self._numbered:
            return None
        lowest = min(self._numbered)
        return self._numbered[lowest] if lowest <= self._next else None

    def begin(self, errand: Task) -> None:
        """The candidate has started."""
        self._remove(errand)
        self.running = errand

    def end(self, outcome: Outcome) -> None:
        """The running request has ended. If it was lost, it may be submitted again with its
        number."""
        errand, self.running = self.running, None
        assert errand is not None
        if errand.seq is None:
            return
        if isinstance(outcome, RequestError) and outcome.code in ("lost", "unavailable"):
            self._next = errand.seq
            self._is_sure = False
        else:
            self._pass(errand, outcome)

    def skip(self) -> list[Task]:
        """Skip requests that were already rejected, and return them."""
        skipped: list[Task] = []
        while (errand := self.candidate()) is not None and errand.outcome is not None:
            self._remove(errand)
            if errand.seq is not None:
                self._pass(errand, errand.outcome)
            skipped.append(errand)
        return skipped

    def withdraw(self, errand: Task) -> None:
        """Drop a request that has not started, as if it had not arrived."""
        self._remove(errand)

    def unsettle(self) -> None:
        """Accept any next sequence number: those in between may be lost."""
        self._is_sure = False

    def overdue(self, now: float, gap: float) -> Task | None:
        """The request that has waited `gap` seconds for a missing lower number, which fails.

        If the next number is unknown, the lowest present one runs instead.
        """
        if self.running is not None or self.candidate() is not None or not self._numbered:
            self.stalled_since = None
            return None
        if self.stalled_since is None:
            self.stalled_since = now
        waited = now - self.stalled_since
        lowest = min(self._numbered)
        if not self._is_sure and waited >= min(SETTLING, gap):
            self._next, self._is_sure = lowest, True
            self.stalled_since = None
            return None
        if waited < gap:
            return None
        errand = self._numbered[lowest]
        errand.outcome = errand.outcome or RequestError(
            "invalid",
            f"number {lowest} of model {self.model} waited {gap:g} s for number {self._next}, which"
            " did not come.\n  Number the works of a model one by one.",
        )
        self._remove(errand)
        self._pass(errand, errand.outcome)
        return errand

    def left(self, room: int) -> QueueState:
        """State for the next process: the last outcomes, of up to `room` bytes, and at least the
        last one."""
        total = itertools.accumulate(kept.bytes for kept in reversed(self._kept.values()))
        count = max(1, sum(size <= room for size in total))
        ended = [
            CompletedRequest(seq=seq, kind=kept.kind.__name__, end=told("", kept.outcome))
            for seq, kept in list(self._kept.items())[-count:]
        ]
        return QueueState(next=self._next, ended=tuple(ended))

    def restore(self, left: QueueState) -> None:
        """Restore the state left by another process; requests waiting there may be lost."""
        for each in left.ended:
            # Another version may have had other request types.
            if each.kind in _KINDS:
                self._keep(each.seq, _KINDS[each.kind], to_outcome(each.end))
        self._next, self._is_sure = left.next, False

    def _remove(self, errand: Task) -> None:
        self.stalled_since = None
        if errand.seq is None:
            self._others.remove(errand)
        else:
            del self._numbered[errand.seq]

    def _pass(self, errand: Task, outcome: Outcome) -> None:
        """Record the outcome of a sequence number and advance."""
        assert errand.seq is not None
        self._keep(errand.seq, type(errand.work), outcome)
        self._next, self._is_sure = errand.seq + 1, True

    def _keep(self, seq: int, kind: type, outcome: Outcome) -> None:
        kept = self._kept[seq] = _Kept(kind, outcome, outcome_num_bytes(outcome))
        self._kept_bytes += kept.bytes
        while len(self._kept) > KEPT or (self._kept_bytes > KEPT_BYTES and len(self._kept) > 1):
            self._kept_bytes -= self._kept.popitem(last=False)[1].bytes

    def _check_kind(self, errand: Task, kind: type) -> None:
        if type(errand.work) is not kind:
            raise RequestError(
                "invalid",
                f"number {errand.seq} of model {self.model} is a {kind.__name__} already; this is"
                f" a {type(errand.work).__name__}.\n  Give each work a number of its own.",
            )
