"""Weight sync errors: the endpoint and step that failed."""

from typing import Literal

from penstock.core.errors import PenstockError
from penstock.server.protocol.codec import Code, error_category
from penstock.server.protocol.types import Endpoint

Step = Literal["settings", "health", "group", "pause", "flush", "update", "destroy", "continue"]
"""In order. After an error in one of the first three, the inference servers keep generating; they
have their old weights unless the error is after the fifth."""


class SyncError(PenstockError):
    """The weight sync failed for some or all endpoints. Reachable endpoints are not left paused."""

    def __init__(
        self,
        fault: str,
        *,
        step: Step,
        endpoint: Endpoint | None = None,
        code: Code = "unavailable",
    ) -> None:
        """`endpoint` None: not specific to one endpoint."""
        address = f"{endpoint.address} " if endpoint else ""
        super().__init__(f"weights were not sent: {address}at the step {step!r}: {fault}")
        self.fault, self.step, self.endpoint = fault, step, endpoint
        self.code: Code = code
        self.category = error_category(code)


def refused(fault: str, endpoint: Endpoint | None = None) -> SyncError:
    """An error that the client can fix."""
    return SyncError(fault, step="settings", endpoint=endpoint, code="invalid")
