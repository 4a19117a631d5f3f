"""What waits to be done, and what of it is next: no I/O, no clock, no knowledge of works.

Works of one model run in their order (see `lane`). Across models, and among works of none, the one
that came first runs first, so that nobody starves.
"""

from collections.abc import Callable, Iterator
from itertools import islice

from penstock.server.scheduler.errors import RequestError
from penstock.server.scheduler.model_queue import ModelQueue
from penstock.server.scheduler.state_store import QueueState
from penstock.server.scheduler.task import Outcome, Task

LEFT_BYTES = 128 << 20
"""Of outcomes that are left to the next process, in equal shares of the models; the last one of
each in any case."""


class Queue:
    """Errands that have not ended. One is under way at a time, or several of drawing."""

    def __init__(self, gap: float) -> None:
        """`gap`: seconds that a work waits for a number before its own."""
        self._gap = gap
        self._lanes: dict[str, ModelQueue] = {}
        self._drawing: list[Task] = []
        self._running: list[Task] = []
        self._arrived = 0

    def __len__(self) -> int:
        """How many works wait."""
        return len(self._drawing) + sum(len(lane) for lane in self._lanes.values())

    @property
    def running(self) -> list[Task]:
        """Those that are under way."""
        return list(self._running)

    def waiting(self) -> list[Task]:
        """Those that have not begun, those that were refused before their turn apart."""
        held = [errand for lane in self._lanes.values() for errand in lane.waiting()]
        return [errand for errand in [*held, *self._drawing] if errand.outcome is None]

    def awaits(self, model: str, kind: type) -> bool:
        """Whether a work of this kind waits among those of this model."""
        lane = self._lanes.get(model)
        return lane is not None and any(
            errand.outcome is None and isinstance(errand.work, kind) for errand in lane.waiting()
        )

    def pending(self, model: str) -> int:
        """How many works of this model have not ended."""
        lane = self._lanes.get(model)
        return len(lane) + (lane.running is not None) if lane else 0

    def pending_of_clients(self, model: str) -> int:
        """The same, without what the engine asked for itself."""
        lane = self._lanes.get(model)
        if lane is None:
            return 0
        under_way = [lane.running] if lane.running else []
        return sum(
            not each.is_ours and each.outcome is None for each in [*lane.waiting(), *under_way]
        )

    def put(self, errand: Task) -> Task | Outcome:
        """Have it done in its turn. Returns the errand that it is now part of, which is another
        where its number is known; or how that one ended.

        Raises RefusedError where its number cannot be.
        """
        self._arrived += 1
        errand.arrived = self._arrived
        if errand.model is None:
            self._drawing.append(errand)
            return errand
        return self._lane(errand.model).put(errand)

    def take(self, may: Callable[[Task], bool] = lambda _: True) -> Task | None:
        """The next that may begin, also by what `may` says, which is under way from now on."""
        for lane in self._lanes.values():
            lane.skip()
        ready = [found for lane in self._lanes.values() if (found := lane.candidate())]
        ready += self._drawing[:1]
        first = min(filter(may, ready), key=lambda errand: errand.arrived, default=None)
        if first is not None:
            self._begin(first)
        return first

    def take_alike(self, most: int, is_alike: Callable[[Task], bool]) -> list[Task]:
        """Up to `most` more works of drawing that are alike, under way as well.

        Only while no other work has waited longer than they have.
        """
        others = [found.arrived for lane in self._lanes.values() if (found := lane.candidate())]
        before = min(others, default=self._arrived + 1)
        early = (errand for errand in self._drawing if errand.arrived < before)
        alike = list(islice(filter(is_alike, early), most))
        for errand in alike:
            self._begin(errand)
        return alike

    def end(self, errand: Task, outcome: Outcome) -> None:
        """One that was under way has ended."""
        self._running.remove(errand)
        if errand.model is not None:
            self._lane(errand.model).end(outcome)

    def refuse(self, errand: Task, outcome: RequestError) -> None:
        """One that waits will not be done; its number is given up in its turn."""
        if errand.model is None:
            self._drawing.remove(errand)
        elif errand.seq is None:
            self._lane(errand.model).withdraw(errand)
        errand.outcome = outcome
        errand.asks = []

    def is_waited_for(self, ask: str) -> bool:
        """Whether somebody waits under this id for what has not begun."""
        return any(ask in errand.asks for errand in self.waiting())

    def cancel(self, ask: str, outcome: RequestError) -> Task | None:
        """Nobody waits under this id any more. The errand, if it has not begun and was refused, as
        nobody at all waits for it.
        """
        for errand in self.waiting():
            if ask in errand.asks:
                errand.asks.remove(ask)
                if not errand.asks:
                    self.refuse(errand, outcome)
                    return errand
        return None

    def abandon(self) -> list[Task]:
        """Drop what waits, but what the engine asked for itself.

        It may be asked for again, in any order.
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
        """Works whose predecessors did not come in time; they have ended."""
        for lane in self._lanes.values():
            if (errand := lane.overdue(now, self._gap)) is not None:
                yield errand

    def begin_anew(self, model: str) -> None:
        """The next numbered work of this model is its first. Nothing of it may be waiting."""
        assert not self.pending(model)
        self._lanes[model] = ModelQueue(model)

    def unsettle(self, model: str) -> None:
        """Whatever number of this model comes first is the next one."""
        self._lane(model).unsettle()

    def left(self) -> dict[str, QueueState]:
        """What the queue of a process to come is to know of each model."""
        room = LEFT_BYTES // max(1, len(self._lanes))
        return {model: its.left(room) for model, its in self._lanes.items()}

    def go_on_from(self, model: str, left: QueueState) -> None:
        """Know what another queue had left of this model."""
        self._lane(model).go_on_from(left)

    def forget(self, model: str) -> None:
        """Nothing more is known of this model, unless works of it are still to end."""
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
