"""How a work is refused: what becomes the failure of its ask."""

import logging

from penstock.server.protocol.codec import Category, Code, error_category
from penstock.server.protocol.envelopes import Failure

LOG = logging.getLogger(__name__)


class RequestError(Exception):
    """A work that is not done. Its text is the fault with its numbers, and the next step."""

    def __init__(self, code: Code, error: str, category: Category | None = None) -> None:
        super().__init__(error)
        self.code: Code = code
        self.category: Category = category or error_category(code)

    def failure(self, ask: str) -> Failure:
        """What the ask of this id is told."""
        return Failure(id=ask, error=str(self), category=self.category, code=self.code)


class StorageLimitError(RequestError):
    """What is to be saved does not fit below `storage_limit`. Nothing of it has been written."""

    def __init__(self, error: str) -> None:
        super().__init__("storage_limit", error)


class WorkersLostError(RequestError):
    """The workers died while they were at it."""

    def __init__(self, error: str) -> None:
        super().__init__("lost", error)


class OperationTimeoutError(WorkersLostError):
    """They were given up, for they took too long over it; so they would again."""


def not_found(what: str) -> RequestError:
    """There is no such thing, or it is another owner's: which of them is not told."""
    return RequestError("not_found", f"there is no {what} of yours")


def internal_error(error: Exception) -> RequestError:
    """What is told of an exception that none should be; the log says the rest."""
    LOG.error("an ask failed by a fault of the engine", exc_info=error)
    what = f": {error}" if isinstance(error, OSError) else ""
    return RequestError("internal", f"the engine failed{what}; its log says why")
