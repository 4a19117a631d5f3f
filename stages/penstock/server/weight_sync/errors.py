"""What a failed sync says: where it failed, and at which step."""

from typing import Literal

from penstock.core.errors import PenstockError
from penstock.server.protocol.codec import Category, Code
from penstock.server.protocol.types import Endpoint

Step = Literal["settings", "health", "group", "pause", "flush", "update", "destroy", "continue"]
"""In their order. The inference servers generate on whatever happens at one of the first three, and
have the weights that they had unless it happens after the fifth."""


class SyncError(PenstockError):
    """Weights were not sent, or not to all. No endpoint is left paused that can still be told."""

    def __init__(
        self,
        fault: str,
        *,
        step: Step,
        endpoint: Endpoint | None = None,
        category: Category = "server",
        code: Code = "unavailable",
    ) -> None:
        """`endpoint` None: it is none of theirs alone."""
        where = f"{named(endpoint)} at the step {step!r}" if endpoint else f"at the step {step!r}"
        super().__init__(f"weights were not sent: {where}: {fault}")
        self.fault, self.step, self.endpoint = fault, step, endpoint
        self.category: Category = category
        self.code: Code = code


def refused(fault: str, endpoint: Endpoint | None = None) -> SyncError:
    """What the one who asked can change."""
    return SyncError(fault, step="settings", endpoint=endpoint, category="user", code="invalid")


def named(endpoint: Endpoint) -> str:
    """Its host and port."""
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"{host}:{endpoint.port}"
