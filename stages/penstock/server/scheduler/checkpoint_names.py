"""Names of models, sessions and checkpoints, and their paths below `output_dir`. Every name is
validated here before it becomes part of a path."""

import re
from dataclasses import dataclass
from typing import Literal

from penstock.server.protocol.types import CHECKPOINT_NAME, MODEL_NAME
from penstock.server.scheduler.errors import RequestError

MODEL, CHECKPOINT = re.compile(MODEL_NAME), re.compile(CHECKPOINT_NAME)

Subfolder = Literal["weights", "sampler_weights"]
"""Folders of training checkpoints and of sampler weights."""

INITIAL = "000000"  # Name of the initial checkpoint of every model
SAMPLER = ":sample:"  # Separator of a session and a sampler number


@dataclass(frozen=True, order=True)
class CheckpointRef:
    """A checkpoint of a model."""

    model: str
    subfolder: Subfolder
    name: str

    def __str__(self) -> str:
        return f"{self.model}/{self.subfolder}/{self.name}"

    @property
    def relative_name(self) -> str:
        return f"{self.subfolder}/{self.name}"


def model_name(name: str) -> str:
    """Validate a name of a model or session. Raises RequestError."""
    return _checked(MODEL, name, "a model or a session", "_ . : -")


def checkpoint_name(name: str) -> str:
    """Validate a name of a checkpoint. Raises RequestError."""
    return _checked(CHECKPOINT, name, "a checkpoint", "_ . -")


def parse_checkpoint_path(path: str) -> CheckpointRef:
    """Parse `<model>/weights/<name>` or `<model>/sampler_weights/<name>`. Raises RequestError."""
    model, _, relative_name = path.partition("/")
    return parse_checkpoint_name(model, relative_name)


def parse_checkpoint_name(model: str, relative_name: str) -> CheckpointRef:
    """Parse `weights/<name>` or `sampler_weights/<name>` of a model. Raises RequestError."""
    subfolder, _, name = relative_name.partition("/")
    if subfolder != "weights" and subfolder != "sampler_weights":
        written = f"{model}/{relative_name}"[:200]
        raise RequestError(
            "invalid",
            f"{written!r} is no path of a checkpoint: it is <model>/weights/<name> or"
            " <model>/sampler_weights/<name>",
        )
    return CheckpointRef(model_name(model), subfolder, checkpoint_name(name))


def sampler_name(session: str, number: int) -> str:
    """The name of a session's sampler of this number."""
    return f"{session}{SAMPLER}{number}"


def _checked(pattern: re.Pattern[str], name: str, kind: str, marks: str) -> str:
    if not pattern.fullmatch(name):
        raise RequestError(
            "invalid",
            f"{name[:200]!r} is no name of {kind}, which starts with an ASCII letter or digit,"
            f" followed by those or {marks}, 128 characters at most",
        )
    return name
