"""Request queues: one per model, and the order across models. No I/O and no clock.

Requests of one model run in the order of their sequence numbers, each once; requests without a
number run after those that arrived before them. Across models, and for requests without a model,
the earliest arrival runs first, so that none starves.
"""

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import get_args

from penstock.server.protocol.envelopes import Answer, Failure
from penstock.server.protocol.requests import Ordered, Sample
from penstock.server.protocol.results import Passed, Result
from penstock.server.scheduler.errors import RequestError
from penstock.server.scheduler.state_store import CompletedRequest, QueueState

FIRST = 1
"""Sequence number of the first request of a model."""

KEPT = 64
"""Outcomes kept per model for repeated requests."""

KEPT_BYTES = 16 << 20
"""Maximum bytes of outcomes; the oldest are dropped beyond it."""

SETTLING = 1.0
"""Seconds in which lower sequence numbers may still arrive before the lowest present one is taken
as the next, if the next number is unknown."""

LEFT_BYTES = 128 << 20
"""Bytes of outcomes left to the next process, shared equally between models; at least the last one
of each."""

Outcome = Result | RequestError
"""The outcome of a task."""


@dataclass(eq=False)
class Task:
    """A waiting or running task."""

    work: Ordered | Sample
    owner: str
    model: str | None
    """The model whose queue it is in; None: sampling, which belongs to no model."""
    seq: int | None = None
    """Sequence number; None: after the requests that arrived before it."""
    asks: list[str] = field(default_factory=list[str])
    """The ids of the requests that receive the outcome."""
    is_ours: bool = False
    """Whether the scheduler created it, so that it runs even if all clients are gone."""
    is_checked: bool = False
    """Whether it has been validated."""
    arrived: int = 0
    """Arrival number over all tasks."""
    outcome: RequestError | None = None
    """The error of a task that was rejected or cancelled while waiting; its sequence number is
    skipped."""


def told(ask: str, outcome: Outcome) -> Answer | Failure:
    """The reply for the request of this id."""
    if isinstance(outcome, RequestError):
        return outcome.failure(ask)
    return Answer(id=ask, result=outcome)


def to_outcome(end: Answer | Failure) -> Outcome:
    """The outcome in a reply."""
    if isinstance(end, Failure):
        return RequestError(end.code, end.error, end.category)
    return end.result


def outcome_num_bytes(outcome: Outcome) -> int:
    """Approximate bytes of an outcome."""
    if not isinstance(outcome, Passed):
        return 1024
    return 1024 + sum(len(array.data) for outputs in outcome.outputs for array in outputs.values())


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


class Queue:
    """Tasks that have not ended. One runs at a time, or several sampling tasks."""

    def __init__(self, gap: float) -> None:
        """`gap`: seconds that a request waits for a missing lower sequence number."""
        self._gap = gap
        self._lanes: dict[str, ModelQueue] = {}
        self._drawing: list[Task] = []
        self._running: list[Task] = []
        self._arrived = 0

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._drawing) + sum(len(lane) for lane in self._lanes.values())

    @property
    def running(self) -> list[Task]:
        """The running tasks."""
        return list(self._running)

    def waiting(self) -> list[Task]:
        """Tasks that have not started, without those that were rejected while waiting."""
        held = [errand for lane in self._lanes.values() for errand in lane.waiting()]
        return [errand for errand in [*held, *self._drawing] if errand.outcome is None]

    def awaits(self, model: str, kind: type) -> bool:
        """Whether a request of this type waits in this model's queue."""
        lane = self._lanes.get(model)
        return lane is not None and any(
            errand.outcome is None and isinstance(errand.work, kind) for errand in lane.waiting()
        )

    def pending(self, model: str) -> int:
        """Number of unfinished requests of this model."""
        lane = self._lanes.get(model)
        return len(lane) + (lane.running is not None) if lane else 0

    def pending_of_clients(self, model: str) -> int:
        """The same, without the scheduler's own requests."""
        lane = self._lanes.get(model)
        if lane is None:
            return 0
        under_way = [lane.running] if lane.running else []
        return sum(
            not each.is_ours and each.outcome is None for each in [*lane.waiting(), *under_way]
        )

    def put(self, errand: Task) -> Task | Outcome:
        """Enqueue a request. Returns its task, which is an existing one if the sequence number is
        known; or the outcome of that.

        Raises RequestError if its number is invalid.
        """
        self._arrived += 1
        errand.arrived = self._arrived
        if errand.model is None:
            self._drawing.append(errand)
            return errand
        return self._lane(errand.model).put(errand)

    def take(self, may: Callable[[Task], bool] = lambda _: True) -> Task | None:
        """Start the next request that `may` accepts."""
        for lane in self._lanes.values():
            lane.skip()
        ready = [found for lane in self._lanes.values() if (found := lane.candidate())]
        ready += self._drawing[:1]
        first = min(filter(may, ready), key=lambda errand: errand.arrived, default=None)
        if first is not None:
            self._begin(first)
        return first

    def take_alike(self, most: int, is_alike: Callable[[Task], bool]) -> list[Task]:
        """Start up to `most` more sampling requests that can be batched with the running one.

        Only if no other request has waited longer.
        """
        others = [found.arrived for lane in self._lanes.values() if (found := lane.candidate())]
        before = min(others, default=self._arrived + 1)
        early = (errand for errand in self._drawing if errand.arrived < before)
        alike = list(itertools.islice(filter(is_alike, early), most))
        for errand in alike:
            self._begin(errand)
        return alike

    def end(self, errand: Task, outcome: Outcome) -> None:
        """A running task has ended."""
        self._running.remove(errand)
        if errand.model is not None:
            self._lane(errand.model).end(outcome)

    def refuse(self, errand: Task, outcome: RequestError) -> None:
        """Reject a waiting request; its sequence number is skipped in its turn."""
        if errand.model is None:
            self._drawing.remove(errand)
        elif errand.seq is None:
            self._lane(errand.model).withdraw(errand)
        errand.outcome = outcome
        errand.asks = []

    def is_waited_for(self, ask: str) -> bool:
        """Whether a client waits for a request of this id that has not started."""
        return any(ask in errand.asks for errand in self.waiting())

    def cancel(self, ask: str, outcome: RequestError) -> Task | None:
        """Cancel the request of this id. Returns its task, if it has not started and no other
        client waits for it."""
        for errand in self.waiting():
            if ask in errand.asks:
                errand.asks.remove(ask)
                if not errand.asks:
                    self.refuse(errand, outcome)
                    return errand
        return None

    def abandon(self) -> list[Task]:
        """Drop waiting requests, except the scheduler's own.

        They may be submitted again, in any order.
        """
        dropped = [errand for errand in self.waiting() if not errand.is_ours]
        for errand in dropped:
            if errand.model is None:
                self._drawing.remove(errand)
            else:
                self._lane(errand.model).withdraw(errand)
        for lane in self._lanes.values():
            lane.unsettle()
        return dropped

    def overdue(self, now: float) -> Iterator[Task]:
        """Requests whose predecessors did not arrive in time; they have failed."""
        for lane in self._lanes.values():
            if (errand := lane.overdue(now, self._gap)) is not None:
                yield errand

    def restart_sequence(self, model: str) -> None:
        """Restart the sequence numbers of this model. None of its requests may be waiting."""
        assert not self.pending(model)
        self._lanes[model] = ModelQueue(model)

    def unsettle(self, model: str) -> None:
        """Accept any next sequence number of this model."""
        self._lane(model).unsettle()

    def left(self) -> dict[str, QueueState]:
        """State of each model's queue for the next process."""
        room = LEFT_BYTES // max(1, len(self._lanes))
        return {model: its.left(room) for model, its in self._lanes.items()}

    def restore(self, model: str, left: QueueState) -> None:
        """Restore the state of this model's queue."""
        self._lane(model).restore(left)

    def forget(self, model: str) -> None:
        """Drop this model's queue once its requests have ended."""
        if not self.pending(model):
            self._lanes.pop(model, None)

    def _begin(self, errand: Task) -> None:
        self._running.append(errand)
        if errand.model is None:
            self._drawing.remove(errand)
        else:
            self._lane(errand.model).begin(errand)

    def _lane(self, model: str) -> ModelQueue:
        return self._lanes.setdefault(model, ModelQueue(model))
