"""Names that clients give or are given, and where below `output_dir` they lead.

A name is checked here, whoever sent it, before it becomes part of a path.
"""

import re
from dataclasses import dataclass
from typing import Literal

from penstock.server.scheduler.errors import RequestError

MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")
CHECKPOINT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")

Room = Literal["weights", "sampler_weights"]
"""Folders of what training goes on from, and of what is sampled from."""

INITIAL = "000000"
"""Name of what is saved of every model as it starts."""

SAMPLER = ":sample:"
"""Between a session and the number of one of its samplers."""


@dataclass(frozen=True, order=True)
class CheckpointRef:
    """One checkpoint of one model."""

    model: str
    room: Room
    name: str

    def __str__(self) -> str:
        return f"{self.model}/{self.room}/{self.name}"

    @property
    def within(self) -> str:
        """Its name within its model."""
        return f"{self.room}/{self.name}"


def model_name(name: str) -> str:
    """The name, if it is one of a model or of a session. Raises RefusedError."""
    return _checked(MODEL, name, "a model or a session", "_ . : -")


def checkpoint_name(name: str) -> str:
    """The name, if it is one of a checkpoint. Raises RefusedError."""
    return _checked(CHECKPOINT, name, "a checkpoint", "_ . -")


def parse_checkpoint_path(path: str) -> CheckpointRef:
    """What `<model>/weights/<name>` or `<model>/sampler_weights/<name>` names.

    Raises RefusedError for all else.
    """
    model, _, within = path.partition("/")
    return spot_in(model, within)


def spot_in(model: str, within: str) -> CheckpointRef:
    """What `weights/<name>` or `sampler_weights/<name>` names of a model. Raises RefusedError."""
    room, _, name = within.partition("/")
    if room != "weights" and room != "sampler_weights":
        written = f"{model}/{within}"[:200]
        raise RequestError(
            "invalid",
            f"{written!r} is no path of a checkpoint: it is <model>/weights/<name> or"
            " <model>/sampler_weights/<name>",
        )
    return CheckpointRef(model_name(model), room, checkpoint_name(name))


def sampler_name(session: str, number: int) -> str:
    """The name of a session's sampler of this number."""
    return f"{session}{SAMPLER}{number}"


def _checked(pattern: re.Pattern[str], name: str, what: str, marks: str) -> str:
    if not pattern.fullmatch(name):
        raise RequestError(
            "invalid",
            f"{name[:200]!r} is no name of {what}, which begins with a letter or a digit of ASCII,"
            f" and goes on with those or {marks}, 128 characters at most",
        )
    return name
