"""Request errors of the scheduler."""

import logging

from penstock.core.os_errors import describe_os_error, is_full_disk
from penstock.server.protocol.codec import Category, Code, error_category
from penstock.server.protocol.envelopes import Failure

LOG = logging.getLogger(__name__)


class RequestError(Exception):
    """A rejected or failed request. The message has its numbers, and what to do."""

    def __init__(self, code: Code, error: str, category: Category | None = None) -> None:
        super().__init__(error)
        self.code: Code = code
        self.category: Category = category or error_category(code)

    def failure(self, request_id: str) -> Failure:
        return Failure(id=request_id, error=str(self), category=self.category, code=self.code)


class WorkersLostError(RequestError):
    """The workers died during the request."""

    def __init__(self, error: str) -> None:
        super().__init__("lost", error)


class OperationTimeoutError(WorkersLostError):
    """The workers were restarted because the request timed out; a retry would time out, too."""


def not_found(name: str) -> RequestError:
    """The object does not exist or belongs to another owner; the message does not say which."""
    return RequestError("not_found", f"there is no {name} of yours")


def to_request_error(error: Exception) -> RequestError:
    """The error for any exception; the details of an unexpected one are logged."""
    if isinstance(error, RequestError):
        return error
    LOG.error("a request failed with an unexpected error", exc_info=error)
    if is_full_disk(error):
        return RequestError("storage_limit", f"the scheduler failed: {describe_os_error(error)}")
    reason = f": {describe_os_error(error)}" if isinstance(error, OSError) else ""
    return RequestError("internal", f"the scheduler failed{reason}; its log has the details")
