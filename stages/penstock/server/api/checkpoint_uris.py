"""Names as clients write them: of models, sessions, samplers and what was saved.

Inside the server a checkpoint is `<model>/weights/<name>`; on the wire it has a scheme before it.
"""

import re
from typing import Annotated

from pydantic import StringConstraints

from penstock.server.api.errors import ApiError

MODEL = r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$"
CHECKPOINT = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"

ModelName = Annotated[str, StringConstraints(pattern=MODEL)]
SessionName = Annotated[str, StringConstraints(pattern=MODEL)]
CheckpointName = Annotated[str, StringConstraints(pattern=CHECKPOINT)]
WrittenPath = Annotated[str, StringConstraints(min_length=1, max_length=400)]
"""Of a checkpoint, with its scheme."""

_PATH = re.compile(
    r"(?:(?:tinker|xorl)://)?"
    r"([A-Za-z0-9][A-Za-z0-9_.:-]{0,127})/((?:sampler_)?weights)/([A-Za-z0-9][A-Za-z0-9_.-]{0,127})"
)
_ID = re.compile(
    r"(?:((?:sampler_)?weights)/(?:([A-Za-z0-9][A-Za-z0-9_.:-]{0,127})/)?)?"
    r"([A-Za-z0-9][A-Za-z0-9_.-]{0,127})"
)

TRAINED = ":train:"
"""Between the session and the number of a model that the SDK named."""


def read_path(written: str) -> str:
    """`<model>/weights/<name>` of a path on the wire. Raises Refusal for what is none."""
    found = _PATH.fullmatch(written)
    if not found:
        raise ApiError(
            f"{written[:200]!r} is no path of a checkpoint: it is"
            " tinker://<model>/weights/<name> or tinker://<model>/sampler_weights/<name>"
        )
    return "/".join(found.groups())


def read_checkpoint(written: str, model: str, room: str = "weights") -> str:
    """`weights/<name>` of what names a checkpoint of a model: that, or a name alone, which is in
    `room`, or `weights/<model>/<name>` (xorl). Raises Refusal for what is none of this model's."""
    found = _ID.fullmatch(written)
    if not found or found[2] not in (None, model):
        raise ApiError(f"{written[:200]!r} names no checkpoint of {model}: it is weights/<name>")
    return f"{found[1] or room}/{found[3]}"


def write_path(model: str, name: str) -> str:
    """A checkpoint's path as the client that named this model writes it."""
    return f"{uri_scheme(model)}://{model}/{name}"


def uri_scheme(model: str) -> str:
    """The SDK's models are named after their session; other clients name them themselves."""
    return "tinker" if TRAINED in model else "xorl"


def model_name(session: str, number: int) -> str:
    """The name of the SDK's model of this number."""
    return f"{session}{TRAINED}{number}"


def session_name(model: str) -> str:
    """The session that a model's name says it is of; a model that a client named is its own."""
    return model.rsplit(TRAINED, 1)[0]
