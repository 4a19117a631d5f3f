"""The works of one model: which of them is next, and how those that are done ended.

Numbered works run by their numbers, each once. Works without a number run after those that came
before them. Nothing is known here of time but what is told.
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
"""Number of the first work of a model."""

KEPT = 64
"""Outcomes of a model that are kept for whoever asks again."""

KEPT_BYTES = 16 << 20
"""The oldest of them are dropped beyond it."""

SETTLING = 1.0
"""Seconds in which lower numbers may still come before the lowest that is there is taken as the
next one, where it is not known which number that is."""

_KINDS = {kind.__name__: kind for kind in get_args(Ordered)}


@dataclass(frozen=True)
class _Kept:
    kind: type
    outcome: Outcome
    bytes: int


class ModelQueue:
    """Works of one model."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.running: Task | None = None
        self.stalled_since: float | None = None
        """Since when works wait for a number that has not come."""
        self._next = FIRST
        self._is_sure = True
        """Whether the next number must be `_next`; else lower ones than those that wait may have
        been lost with who asked for them."""
        self._numbered: dict[int, Task] = {}
        self._others: deque[Task] = deque()
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._kept_bytes = 0

    def __len__(self) -> int:
        """How many works wait that are still to be done."""
        return sum(1 for errand in self.waiting() if errand.outcome is None)

    def waiting(self) -> list[Task]:
        """All that have not begun."""
        return [*self._numbered.values(), *self._others]

    def put(self, errand: Task) -> Task | Outcome:
        """Take a work in. Returns the errand that it is now part of, which is another where its
        number is known; or how that one ended.

        Raises RefusedError for a number that is known for another work, or is forgotten.
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
        """The work that is next, if it may begin now."""
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
        """The candidate is under way."""
        self._remove(errand)
        self.running = errand

    def end(self, outcome: Outcome) -> None:
        """What was under way has ended. What was lost may be asked for again by its number."""
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
        """Let works that are refused already give up their turns, and return them."""
        skipped: list[Task] = []
        while (errand := self.candidate()) is not None and errand.outcome is not None:
            self._remove(errand)
            if errand.seq is not None:
                self._pass(errand, errand.outcome)
            skipped.append(errand)
        return skipped

    def withdraw(self, errand: Task) -> None:
        """Drop a work that has not begun, as if nobody had asked for it."""
        self._remove(errand)

    def unsettle(self) -> None:
        """Whatever number comes first is the next one: those between may be lost."""
        self._is_sure = False

    def overdue(self, now: float, gap: float) -> Task | None:
        """The work that has waited `gap` seconds for a number before its own, which it gives up.

        Where no number is sure to come, the lowest there is has its turn instead.
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
        """What the lane of a process to come is to know: the last outcomes, of up to `room` bytes,
        and the last one in any case."""
        total = itertools.accumulate(kept.bytes for kept in reversed(self._kept.values()))
        count = max(1, sum(size <= room for size in total))
        ended = [
            CompletedRequest(seq=seq, kind=kept.kind.__name__, end=told("", kept.outcome))
            for seq, kept in list(self._kept.items())[-count:]
        ]
        return QueueState(next=self._next, ended=tuple(ended))

    def go_on_from(self, left: QueueState) -> None:
        """Know what another lane of this model had left; works that waited there may be lost."""
        for each in left.ended:
            # Another version may have had others.
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
        """Keep how a number ended, and go on to the next."""
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
