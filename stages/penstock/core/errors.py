"""Exceptions of this project and their exit codes.

PenstockError
├── ConfigError      2  the settings are invalid; nothing has started
│   └── ElsewhereError      a path that probably belongs to another machine
├── CapabilityError  3  this machine, build or account lacks something required
│   └── UnreachableError    a remote location cannot be reached now
├── ArtifactError    1  something on disk does not match its manifest
│   └── DamagedFileError     a file does not have its expected format
├── StageError       1  a stage failed; its incomplete folder is kept, so a rerun resumes
└── Interrupted    130  a user or the system stopped the run; resumable
"""


class PenstockError(Exception):
    """Base of every error that this project raises on purpose. Its message is all that a user
    needs."""

    exit_code = 1
    may_pass = False  # Whether a retry with nothing changed may succeed


class ConfigError(PenstockError, ValueError):
    """The settings are invalid. A ValueError, so that pydantic collects it."""

    exit_code = 2


class ElsewhereError(ConfigError):
    """The settings name a path whose parent folder does not exist on this machine."""


class CapabilityError(PenstockError):
    """This machine, build or account lacks something that the settings require."""

    exit_code = 3


class UnreachableError(CapabilityError):
    """The settings name a remote location that cannot be reached; it may be valid."""


class ArtifactError(PenstockError):
    """An artifact on disk does not match its manifest."""


class DamagedFileError(ArtifactError, ValueError):
    """A file does not have the format that its name implies. A ValueError, as raised by parsers."""


class StageError(PenstockError):
    """A stage failed."""


class Interrupted(PenstockError):  # noqa: N818 - an interruption is not an error
    """The run was stopped on request and can be resumed."""

    exit_code = 130

    def __init__(self, message: str, signum: int = 2) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum
