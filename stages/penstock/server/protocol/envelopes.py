"""What the API and the engine say to each other: works that are asked for, and how they ended."""

from typing import Literal

from penstock.server.protocol.codec import Category, Code, Message
from penstock.server.protocol.requests import Work
from penstock.server.protocol.results import Result


class Request(Message):
    """A work to do."""

    id: str
    owner: str
    """Whose key it came with, as `api.keys` names it; others' things are not found."""
    work: Work
    seq: int | None = None
    """Its number among those of its model; None: after those that came before it."""


class Cancel(Message):
    """Do not begin the work of this ask, if it has not begun."""

    id: str


class Hello(Message):
    """First word of an API process. What another one asked for before is not begun any more."""

    instance: str


ToEngine = Hello | Request | Cancel


class Answer(Message):
    """The end of an ask."""

    id: str
    result: Result


class Failure(Message):
    """Its other end."""

    id: str
    error: str
    """The fault with its numbers, and the next step."""
    category: Category
    code: Code


class Status(Message):
    """How the engine is; told when it changes, and once a second."""

    workers: Literal["starting", "ready", "down", "failed"]
    """`down`: they died and are started again; `failed`: they are not any more."""
    reason: str = ""
    queued: int = 0
    running: str = ""
    """The id of the ask that the workers are at."""


FromEngine = Answer | Failure | Status
