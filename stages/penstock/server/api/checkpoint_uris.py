"""Checkpoint URIs (`tinker://…`) and names of models, sessions and samplers. Inside the server a
checkpoint is `<model>/weights/<name>`; the API adds a scheme."""

import re
from typing import Annotated

from pydantic import StringConstraints

from penstock.server.api.errors import ApiError
from penstock.server.protocol.types import CHECKPOINT_NAME, MODEL_NAME

# pydantic's regexes are Rust's, where `$` is the end of the text; Python's also matches before a
# newline there, so `re` gets patterns without anchors and `fullmatch`.
ModelName = Annotated[str, StringConstraints(pattern=f"^{MODEL_NAME}$")]
SessionName = ModelName
CheckpointName = Annotated[str, StringConstraints(pattern=f"^{CHECKPOINT_NAME}$")]
WrittenPath = Annotated[str, StringConstraints(min_length=1, max_length=400)]
"""A checkpoint path with its scheme."""

_PATH = re.compile(
    rf"(?:(?:tinker|xorl)://)?({MODEL_NAME})/((?:sampler_)?weights)/({CHECKPOINT_NAME})"
)
_ID = re.compile(rf"(?:((?:sampler_)?weights)/(?:({MODEL_NAME})/)?)?({CHECKPOINT_NAME})")
TRAINED = ":train:"  # Separator of session and model number in the SDK's model names


def read_path(written: str) -> str:
    """`<model>/weights/<name>` of a checkpoint path. Raises ApiError if it is invalid."""
    match = _PATH.fullmatch(written)
    if not match:
        raise ApiError(
            f"{written[:200]!r} is no path of a checkpoint: it is"
            " tinker://<model>/weights/<name> or tinker://<model>/sampler_weights/<name>"
        )
    return "/".join(match.groups())


def read_checkpoint(written: str, model: str, room: str = "weights") -> str:
    """`weights/<name>` of a checkpoint of a model: a path, a name alone (in the folder `room`), or
    `weights/<model>/<name>` (xorl). Raises ApiError for a checkpoint of another model."""
    match = _ID.fullmatch(written)
    if not match or match[2] not in (None, model):
        raise ApiError(f"{written[:200]!r} names no checkpoint of {model}: it is weights/<name>")
    return f"{match[1] or room}/{match[3]}"


def write_path(model: str, name: str) -> str:
    """The checkpoint path as used by the client that named this model."""
    return f"{uri_scheme(model)}://{model}/{name}"


def uri_scheme(model: str) -> str:
    """The URI scheme: the SDK's models are named after their session, those of others are not."""
    return "tinker" if TRAINED in model else "xorl"


def model_name(session: str, number: int) -> str:
    """The name of the SDK's model of this number."""
    return f"{session}{TRAINED}{number}"


def session_name(model: str) -> str:
    """The session in a model's name; a model that a client named is its own session."""
    return model.rsplit(TRAINED, 1)[0]
