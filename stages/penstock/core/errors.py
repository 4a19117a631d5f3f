"""Every error a user can cause or meet, and the exit code each one means.

PenstockError
├── ConfigError      2  the settings cannot be honoured; nothing has started
│   └── ElsewhereError      a path of another machine, by all appearance
├── CapabilityError  3  this machine, build or account lacks what the settings ask for
│   └── UnreachableError    where it lies cannot be asked now
├── ArtifactError    1  something on disk is not what its manifest says
│   └── DamagedFileError     one file cannot be read as what it is
├── StageError       1  a stage did not finish; its unsealed folder is kept, so a rerun resumes
└── Interrupted    130  a person or the system asked the run to stop; resumable
"""


class PenstockError(Exception):
    """Base of every error that this project raises on purpose. Its message is all that a user
    needs."""

    exit_code = 1
    may_pass = False
    """Whether a retry with nothing changed may succeed."""


class ConfigError(PenstockError, ValueError):
    """The settings are invalid. A ValueError, so that pydantic collects it."""

    exit_code = 2


class ElsewhereError(ConfigError):
    """The settings name a path whose parent folder does not exist on this machine."""


class CapabilityError(PenstockError):
    """This machine, build or account lacks something the settings ask for."""

    exit_code = 3


class UnreachableError(CapabilityError):
    """The settings name a remote location that cannot be reached; it may be valid."""


class ArtifactError(PenstockError):
    """An artifact on disk does not match its manifest."""


class DamagedFileError(ArtifactError, ValueError):
    """A file does not have the format that its name implies. A ValueError, as raised by parsers."""


class StageError(PenstockError):
    """A stage failed."""


class Interrupted(PenstockError):  # noqa: N818 - an interruption is not a fault
    """The run was asked to stop and did, leaving everything resumable."""

    exit_code = 130

    def __init__(self, message: str, signum: int = 2) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum
