"""Messages between API and scheduler: requests and their outcome."""

from typing import Literal

from penstock.server.protocol.codec import Category, Code, Message
from penstock.server.protocol.requests import Operation
from penstock.server.protocol.results import Result


class Request(Message):
    """A request."""

    id: str
    owner: str  # Owner of the API key, as in `api.middleware.auth`; objects of others are not found
    operation: Operation
    seq: int | None = None
    """Sequence number within its model; None: after the requests that arrived before it."""


class Cancel(Message):
    """Cancel a request unless it has started."""

    id: str


class Hello(Message):
    """First message of an API process, whose predecessor's waiting requests the scheduler drops;
    and of a scheduler, to which workers reply with Ready."""

    instance: str


ToScheduler = Hello | Request | Cancel


class Response(Message):
    """The result of a request."""

    id: str
    result: Result


class Failure(Message):
    """The error of a request."""

    id: str
    error: str  # The message with its numbers, and what to do
    category: Category
    code: Code


class Status(Message):
    """The scheduler's status; sent on changes, and once a second."""

    workers: Literal["starting", "ready", "down", "failed"]
    """`down`: they died and are being restarted; `failed`: they are not restarted any more."""
    reason: str = ""
    queued: int = 0
    running: str = ""  # The id of the request that the workers are running


FromScheduler = Response | Failure | Status
