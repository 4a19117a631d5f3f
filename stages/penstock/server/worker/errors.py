"""Worker errors and their error codes."""

from penstock.core.errors import (
    ArtifactError,
    CapabilityError,
    ConfigError,
    PenstockError,
    StageError,
)
from penstock.engine.generation import generator
from penstock.engine.multi_lora.model_pool import UnknownModelError
from penstock.engine.multi_lora.optim_step import NotFiniteError
from penstock.server.protocol.codec import Code
from penstock.server.weight_sync.errors import SyncError


class CommandError(PenstockError):
    """A rejected command, with the reason."""

    def __init__(self, code: Code, error: str) -> None:
        super().__init__(error)
        self.code: Code = code


CODES: tuple[tuple[type[PenstockError], Code], ...] = (
    (UnknownModelError, "not_found"),
    (NotFiniteError, "not_finite"),
    (generator.NotFiniteError, "not_finite"),
    (ConfigError, "invalid"),
    (CapabilityError, "invalid"),
    (ArtifactError, "invalid"),
    (StageError, "internal"),
)
"""The first match applies."""


def error_code(error: PenstockError) -> Code:
    """The error code of an exception."""
    if isinstance(error, CommandError | SyncError):
        return error.code
    for kind, code in CODES:
        if isinstance(error, kind):
            return code
    return "internal"
