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
    """Base of every error this project raises on purpose. Its text is all a user needs to see."""

    exit_code = 1
    may_pass = False
    """Whether the same may go well when it is tried again, with nothing changed."""


class ConfigError(PenstockError, ValueError):
    """The settings cannot be honoured. A ValueError, so that pydantic collects it."""

    exit_code = 2


class ElsewhereError(ConfigError):
    """Settings name a path of which not even the folder is on this machine."""


class CapabilityError(PenstockError):
    """This machine, build or account lacks something the settings ask for."""

    exit_code = 3


class UnreachableError(CapabilityError):
    """What the settings name lies elsewhere, and nobody there answers: it may be as it should."""


class ArtifactError(PenstockError):
    """An artifact on disk disagrees with its manifest."""


class DamagedFileError(ArtifactError, ValueError):
    """A file is not of the form that its name promises. A ValueError, as parsers raise."""


class StageError(PenstockError):
    """A stage did not finish."""


class Interrupted(PenstockError):  # noqa: N818 - an interruption is not a fault
    """The run was asked to stop and did, leaving everything resumable."""

    exit_code = 130

    def __init__(self, message: str, signum: int = 2) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum
