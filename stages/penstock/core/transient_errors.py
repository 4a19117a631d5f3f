"""Which errors may pass: those of the network, of stores and of the Hub, and Penstock's own."""

from penstock.core.errors import ArtifactError, ConfigError, Interrupted, PenstockError
from penstock.core.remote.connection_errors import iter_causes
from penstock.core.remote.errors import classify_error


def is_transient(error: BaseException) -> bool:
    """Whether a retry with nothing changed may succeed."""
    for cause in iter_causes(error):
        if isinstance(cause, PenstockError):
            if cause.may_pass:
                return True
            if isinstance(cause, ConfigError | ArtifactError | Interrupted):
                return False
        elif type(cause).__name__ == "OfflineModeIsEnabled":
            return False
        elif isinstance(cause, Exception) and (kind := classify_error(cause)) != "absent":
            return kind == "cut"
    return False
