"""Task: one unit of work, and all requests that wait for its outcome."""

from dataclasses import dataclass, field

from penstock.server.protocol.envelopes import Answer, Failure
from penstock.server.protocol.requests import Ordered, Sample
from penstock.server.protocol.results import Passed, Result
from penstock.server.scheduler.errors import RequestError

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
