"""Worker errors and their error codes."""

from penstock.core.errors import ArtifactError, CapabilityError, ConfigError, PenstockError
from penstock.engine.generation import run
from penstock.engine.multi_lora.model_pool import UnknownModelError
from penstock.engine.multi_lora.optim_step import NotFiniteError
from penstock.server.protocol.codec import Code
from penstock.server.weight_sync.errors import SyncError


class CommandError(PenstockError):
    """A rejected command, with the reason."""

    def __init__(self, code: Code, error: str) -> None:
        super().__init__(error)
        self.code: Code = code


def error_code(error: PenstockError) -> Code:
    """The error code of an exception."""
    if isinstance(error, CommandError | SyncError):
        return error.code
    if isinstance(error, UnknownModelError):
        return "not_found"
    if isinstance(error, NotFiniteError | run.NotFiniteError):
        return "not_finite"
    is_invalid = isinstance(error, ConfigError | CapabilityError | ArtifactError)
    return "invalid" if is_invalid else "internal"
