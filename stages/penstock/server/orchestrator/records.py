"""What the engine knows of sessions, models and checkpoints, in the form in which it is kept."""

import msgspec

from penstock.server.protocol.values import Lora, Optimizer


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint of a model; its room and name are those it is kept under."""

    time: float
    """Seconds since the epoch."""
    size: int
    base_model: str
    lora: Lora | None = None
    """Of the model as it was then; None: all weights."""
    step: int = 0
    """How many its optimizer had made."""
    expires: float | None = None
    public: bool = False
    sampler: str | None = None
    """The sampler that it goes with; None: it stays for itself."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What a model goes on from when its workers are lost."""

    path: str
    optimizer: bool


class ModelRecord(msgspec.Struct, kw_only=True):
    """A model that is trained, or was."""

    model: str
    session: str
    owner: str
    base_model: str
    lora: Lora | None
    optimizer_config: Optimizer
    user_metadata: dict[str, str]
    created: float
    last_request: float
    is_open: bool = False
    """Whether workers hold it, or are to hold it again."""
    instance: str = ""
    """Of the workers that hold it."""
    start: Start | None = None
    """None: it goes on from how it was made."""
    is_unsaved: bool = False
    """Whether it has changed since `start`."""
    corrupted: bool = False
    """Whether what a client last saw of it was lost, and nobody was told yet."""
    step: int = 0
    """How many its optimizer had made at `start`."""
    state_bytes: int = 0
    """What a checkpoint of it takes, as workers told."""
    export_bytes: int = 0
    closing: str = ""
    """Why it is not open."""
    checkpoints: dict[str, Kept] = {}
    """By `weights/<name>` or `sampler_weights/<name>`."""


class SamplerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a sampler samples from."""

    base_model: str
    path: str | None


class SessionRecord(msgspec.Struct, kw_only=True):
    """A session of a client's."""

    session: str
    owner: str
    created: float
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, str] = {}
    samplers: dict[str, SamplerRecord] = {}
    has_ended: bool = False
    ending: str = ""
    """Why it has."""
