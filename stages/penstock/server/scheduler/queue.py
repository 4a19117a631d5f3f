"""Request queue over all models. No I/O, no clock, no knowledge of request types.

Requests of one model run in their order (see `model_queue`). Across models, and for requests
without model, the earliest arrival runs first, so that none starves.
"""

from collections.abc import Callable, Iterator
from itertools import islice

from penstock.server.scheduler.errors import RequestError
from penstock.server.scheduler.model_queue import ModelQueue
from penstock.server.scheduler.state_store import QueueState
from penstock.server.scheduler.task import Outcome, Task

LEFT_BYTES = 128 << 20
"""Bytes of outcomes left to the next process, shared equally between models; at least the last one
of each."""


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
        alike = list(islice(filter(is_alike, early), most))
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
