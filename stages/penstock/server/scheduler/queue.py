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

from penstock.server.protocol.envelopes import Failure, Response
from penstock.server.protocol.requests import ModelOperation, Sample
from penstock.server.protocol.results import ForwardBackwardResult, Result
from penstock.server.scheduler.errors import RequestError
from penstock.server.scheduler.state_store import CompletedRequest, QueueState

FIRST = 1  # Sequence number of the first request of a model
MAX_OUTCOMES = 64  # Outcomes kept per model for repeated requests
MAX_OUTCOME_BYTES = 16 << 20  # Maximum bytes of outcomes; the oldest are dropped beyond it
# Seconds in which lower sequence numbers may still arrive before the lowest present one is taken as
# the next, if the next number is unknown.
SETTLE_SECONDS = 1.0

MAX_SHUTDOWN_STATE_BYTES = 128 << 20
"""Of outcomes for the next process, shared equally by models; at least the last one of each."""

Outcome = Result | RequestError


# Without `eq` lists find a task by identity, and do not compare all arrays of operations.
@dataclass(eq=False)
class Task:
    """A waiting or running task."""

    operation: ModelOperation | Sample
    owner: str
    model: str | None  # The model whose queue it is in; None: sampling, which belongs to no model
    seq: int | None = None  # Sequence number; None: after the requests that arrived before it
    request_ids: list[str] = field(default_factory=list[str])
    """The ids of the requests that receive the outcome."""
    is_internal: bool = False
    """Whether the scheduler created it, so that it runs even if all clients are gone."""
    is_checked: bool = False
    arrival: int = 0
    outcome: RequestError | None = None
    """Of a task that was rejected or cancelled while waiting; its sequence number is skipped."""


def to_response(request_id: str, outcome: Outcome) -> Response | Failure:
    """The reply for the request of this id."""
    if isinstance(outcome, RequestError):
        return outcome.failure(request_id)
    return Response(id=request_id, result=outcome)


def to_outcome(end: Response | Failure) -> Outcome:
    """The outcome in a reply."""
    if isinstance(end, Failure):
        return RequestError(end.code, end.error, end.category)
    return end.result


def outcome_num_bytes(outcome: Outcome) -> int:
    """Approximate bytes of an outcome."""
    if not isinstance(outcome, ForwardBackwardResult):
        return 1024
    return 1024 + sum(len(array.data) for outputs in outcome.outputs for array in outputs.values())


_KINDS = {kind.__name__: kind for kind in get_args(ModelOperation)}


@dataclass(frozen=True)
class _StoredOutcome:
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
        self._is_next_known = True
        """Whether the next number must be `_next`; otherwise requests with lower numbers may have
        been lost with the API process."""
        self._numbered: dict[int, Task] = {}
        self._unnumbered: deque[Task] = deque()
        self._outcomes: OrderedDict[int, _StoredOutcome] = OrderedDict()
        self._outcome_bytes = 0

    def __len__(self) -> int:
        """Number of waiting requests that are still to run."""
        return sum(1 for task in self.waiting() if task.outcome is None)

    def waiting(self) -> list[Task]:
        """All requests that have not started."""
        return [*self._numbered.values(), *self._unnumbered]

    def put(self, task: Task) -> Task | Outcome:
        """Add a request. Returns its task, which is an existing one if the sequence number is
        known; or the outcome of that. Raises RequestError if the number belongs to another request,
        or its outcome was dropped."""
        seq = task.seq
        if seq is None:
            self._unnumbered.append(task)
            return task
        if seq in self._outcomes:
            self._check_type(task, self._outcomes[seq].kind)
            return self._outcomes[seq].outcome
        queued = self._numbered.get(seq)
        if queued is None and self.running is not None and self.running.seq == seq:
            queued = self.running
        if queued is not None:
            self._check_type(task, type(queued.operation))
            if queued.outcome is not None:
                return queued.outcome
            queued.request_ids += task.request_ids
            return queued
        if seq < self._next and (self._outcomes or self._next > FIRST):
            raise RequestError(
                "gone",
                f"number {seq} of model {self.model} is past, and its outcome is not kept any"
                f" more; the next is {self._next}.\n  Continue with higher numbers.",
            )
        self._numbered[seq] = task
        return task

    def candidate(self) -> Task | None:
        """The next request, if it may start now."""
        if self.running is not None:
            return None
        if self._unnumbered:
            first = self._unnumbered[0]
            if all(task.arrival > first.arrival for task in self._numbered.values()):
                return first
        if not self._numbered:
            return None
        lowest = min(self._numbered)
        return self._numbered[lowest] if lowest <= self._next else None

    def begin(self, task: Task) -> None:
        self.remove(task)
        self.running = task

    def end(self, outcome: Outcome) -> None:
        """The running request has ended. If it was lost, its number may be submitted again."""
        task, self.running = self.running, None
        assert task is not None
        if task.seq is None:
            return
        if isinstance(outcome, RequestError) and outcome.code in ("lost", "unavailable"):
            self._next = task.seq
            self._is_next_known = False
        else:
            self._complete(task, outcome)

    def skip(self) -> None:
        """Skip requests that were already rejected."""
        while (task := self.candidate()) is not None and task.outcome is not None:
            self.remove(task)
            if task.seq is not None:
                self._complete(task, task.outcome)

    def accept_any_next(self) -> None:
        """Accept any next sequence number: those in between may be lost."""
        self._is_next_known = False

    def pop_overdue(self, now: float, gap: float) -> Task | None:
        """The request that has waited `gap` seconds for a missing lower number, which fails. If the
        next number is unknown, the lowest present one runs instead."""
        if self.running is not None or self.candidate() is not None or not self._numbered:
            self.stalled_since = None
            return None
        if self.stalled_since is None:
            self.stalled_since = now
        waited = now - self.stalled_since
        lowest = min(self._numbered)
        if not self._is_next_known and waited >= min(SETTLE_SECONDS, gap):
            self._next, self._is_next_known = lowest, True
            self.stalled_since = None
            return None
        if waited < gap:
            return None
        task = self._numbered[lowest]
        task.outcome = task.outcome or RequestError(
            "invalid",
            f"number {lowest} of model {self.model} waited {gap:g} s for number {self._next}, which"
            " did not come.\n  Number the requests of a model consecutively.",
        )
        self.remove(task)
        self._complete(task, task.outcome)
        return task

    def left(self, max_bytes: int) -> QueueState:
        """State for the next process: the last outcomes, up to `max_bytes`, at least one."""
        totals = itertools.accumulate(stored.bytes for stored in reversed(self._outcomes.values()))
        count = max(1, sum(total <= max_bytes for total in totals))
        ended = [
            CompletedRequest(
                seq=seq, kind=stored.kind.__name__, end=to_response("", stored.outcome)
            )
            for seq, stored in list(self._outcomes.items())[-count:]
        ]
        return QueueState(next=self._next, ended=tuple(ended))

    def restore(self, state: QueueState) -> None:
        """Restore the state left by another process; requests waiting there may be lost."""
        for ended in state.ended:
            # Another version may have had other request types.
            if ended.kind in _KINDS:
                self._store_outcome(ended.seq, _KINDS[ended.kind], to_outcome(ended.end))
        self._next, self._is_next_known = state.next, False

    def remove(self, task: Task) -> None:
        """Drop a request that has not started, as if it had not arrived."""
        self.stalled_since = None
        if task.seq is None:
            self._unnumbered.remove(task)
        else:
            del self._numbered[task.seq]

    def _complete(self, task: Task, outcome: Outcome) -> None:
        assert task.seq is not None
        self._store_outcome(task.seq, type(task.operation), outcome)
        self._next, self._is_next_known = task.seq + 1, True

    def _store_outcome(self, seq: int, kind: type, outcome: Outcome) -> None:
        stored = self._outcomes[seq] = _StoredOutcome(kind, outcome, outcome_num_bytes(outcome))
        self._outcome_bytes += stored.bytes
        while len(self._outcomes) > MAX_OUTCOMES or (
            self._outcome_bytes > MAX_OUTCOME_BYTES and len(self._outcomes) > 1
        ):
            self._outcome_bytes -= self._outcomes.popitem(last=False)[1].bytes

    def _check_type(self, task: Task, kind: type) -> None:
        if type(task.operation) is not kind:
            raise RequestError(
                "invalid",
                f"number {task.seq} of model {self.model} is a {kind.__name__} already; this is"
                f" a {type(task.operation).__name__}.\n  Give each request its own number.",
            )


class RequestQueue:
    """Tasks that have not ended. One runs at a time, or several sampling tasks."""

    def __init__(self, gap: float) -> None:
        """`gap`: seconds that a request waits for a missing lower sequence number."""
        self._gap = gap
        self._model_queues: dict[str, ModelQueue] = {}
        self._sampling_tasks: list[Task] = []
        self.running: list[Task] = []
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._sampling_tasks) + sum(len(lane) for lane in self._model_queues.values())

    def waiting(self) -> list[Task]:
        """Tasks that have not started, without those that were rejected while waiting."""
        held = [task for lane in self._model_queues.values() for task in lane.waiting()]
        return [task for task in [*held, *self._sampling_tasks] if task.outcome is None]

    def has_waiting(self, model: str, kind: type) -> bool:
        return any(
            task.model == model and isinstance(task.operation, kind) for task in self.waiting()
        )

    def pending(self, model: str) -> int:
        """Number of unfinished requests of this model."""
        lane = self._model_queues.get(model)
        return len(lane) + (lane.running is not None) if lane else 0

    def pending_from_clients(self, model: str) -> int:
        """The same, without the scheduler's own requests."""
        lane = self._model_queues.get(model)
        if lane is None:
            return 0
        running = [lane.running] if lane.running else []
        return sum(
            not task.is_internal and task.outcome is None for task in [*lane.waiting(), *running]
        )

    def put(self, task: Task) -> Task | Outcome:
        """Enqueue a request. Returns its task, which is an existing one if the sequence number is
        known; or the outcome of that. Raises RequestError if its number is invalid."""
        self._num_arrivals += 1
        task.arrival = self._num_arrivals
        if task.model is None:
            self._sampling_tasks.append(task)
            return task
        return self._model_queue(task.model).put(task)

    def take(self, may: Callable[[Task], bool] = lambda _: True) -> Task | None:
        """Start the next request that `may` accepts."""
        for lane in self._model_queues.values():
            lane.skip()
        ready = [*self._candidates(), *self._sampling_tasks[:1]]
        first = min(filter(may, ready), key=lambda task: task.arrival, default=None)
        if first is not None:
            self._begin(first)
        return first

    def take_batch(self, most: int, is_alike: Callable[[Task], bool]) -> list[Task]:
        """Start up to `most` more sampling requests that can join the running ones. Only if no
        other request has waited longer."""
        arrivals = [task.arrival for task in self._candidates()]
        before = min(arrivals, default=self._num_arrivals + 1)
        early = (task for task in self._sampling_tasks if task.arrival < before)
        alike = list(itertools.islice(filter(is_alike, early), most))
        for task in alike:
            self._begin(task)
        return alike

    def end(self, task: Task, outcome: Outcome) -> None:
        self.running.remove(task)
        if task.model is not None:
            self._model_queue(task.model).end(outcome)

    def reject(self, task: Task, outcome: RequestError) -> None:
        """Reject a waiting request; its sequence number is skipped in its turn."""
        if task.seq is None:
            self._remove(task)
        task.outcome = outcome
        task.request_ids = []

    def is_waiting(self, request_id: str) -> bool:
        """Whether a client waits for a request of this id that has not started."""
        return any(request_id in task.request_ids for task in self.waiting())

    def cancel(self, request_id: str, outcome: RequestError) -> Task | None:
        """Cancel the request of this id. Returns its task, if it has not started and no other
        client waits for it."""
        for task in self.waiting():
            if request_id in task.request_ids:
                task.request_ids.remove(request_id)
                if not task.request_ids:
                    self.reject(task, outcome)
                    return task
        return None

    def drop_waiting(self) -> list[Task]:
        """Drop clients' waiting requests, which may be submitted again, in any order."""
        dropped = [task for task in self.waiting() if not task.is_internal]
        for task in dropped:
            self._remove(task)
        for lane in self._model_queues.values():
            lane.accept_any_next()
        return dropped

    def pop_overdue(self, now: float) -> Iterator[Task]:
        """Requests whose predecessors did not arrive in time; they have failed."""
        for lane in self._model_queues.values():
            if (task := lane.pop_overdue(now, self._gap)) is not None:
                yield task

    def restart_sequence(self, model: str) -> None:
        """Restart the sequence numbers of this model. None of its requests may be waiting."""
        assert not self.pending(model)
        self._model_queues[model] = ModelQueue(model)

    def accept_any_next(self, model: str) -> None:
        self._model_queue(model).accept_any_next()

    def left(self) -> dict[str, QueueState]:
        """State of each model's queue for the next process."""
        max_bytes = MAX_SHUTDOWN_STATE_BYTES // max(1, len(self._model_queues))
        return {model: lane.left(max_bytes) for model, lane in self._model_queues.items()}

    def restore(self, model: str, state: QueueState) -> None:
        self._model_queue(model).restore(state)

    def forget(self, model: str) -> None:
        """Drop this model's queue once its requests have ended."""
        if not self.pending(model):
            self._model_queues.pop(model, None)

    def _begin(self, task: Task) -> None:
        self.running.append(task)
        if task.model is None:
            self._sampling_tasks.remove(task)
        else:
            self._model_queue(task.model).begin(task)

    def _remove(self, task: Task) -> None:
        if task.model is None:
            self._sampling_tasks.remove(task)
        else:
            self._model_queue(task.model).remove(task)

    def _candidates(self) -> list[Task]:
        return [task for lane in self._model_queues.values() if (task := lane.candidate())]

    def _model_queue(self, model: str) -> ModelQueue:
        return self._model_queues.setdefault(model, ModelQueue(model))
