"""An errand: one work to be done, and all asks that its end is to be told to."""

from dataclasses import dataclass, field

from penstock.server.protocol.envelopes import Answer, Failure
from penstock.server.protocol.requests import Ordered, Sample
from penstock.server.protocol.results import Passed, Result
from penstock.server.scheduler.errors import RequestError

Outcome = Result | RequestError
"""How an errand ends."""


@dataclass(eq=False)
class Task:
    """A work that waits for its turn, or is under way."""

    work: Ordered | Sample
    owner: str
    model: str | None
    """Whose works it is one of, in their order; None: drawing, which is of no model."""
    seq: int | None = None
    """Its number among them; None: after those that came before it."""
    asks: list[str] = field(default_factory=list[str])
    """The ids of those that are to be told."""
    is_ours: bool = False
    """Whether the engine asked, so that it is done though clients have gone."""
    is_checked: bool = False
    """Whether it was found to be what can be done."""
    arrived: int = 0
    """Counts what came before it, of all works."""
    outcome: RequestError | None = None
    """Of one that was refused or cancelled before its turn, which it then only gives up."""


def told(ask: str, outcome: Outcome) -> Answer | Failure:
    """What the ask of this id is told."""
    if isinstance(outcome, RequestError):
        return outcome.failure(ask)
    return Answer(id=ask, result=outcome)


def to_outcome(end: Answer | Failure) -> Outcome:
    """What was told."""
    if isinstance(end, Failure):
        return RequestError(end.code, end.error, end.category)
    return end.result


def outcome_num_bytes(outcome: Outcome) -> int:
    """About what it takes to keep an outcome."""
    if not isinstance(outcome, Passed):
        return 1024
    return 1024 + sum(len(array.data) for outputs in outcome.outputs for array in outputs.values())
