"""What the engine knows of sessions, models and checkpoints, in the form in which it is kept."""

import time

import msgspec

from penstock.server.protocol.asks import Answer, Failure
from penstock.server.protocol.values import Lora, Optimizer
from penstock.server.protocol.works import CreateModel


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
    user_metadata: dict[str, str] = {}


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What a model goes on from when its workers are lost."""

    path: str
    optimizer: bool
    time: float | None = None
    """Of the checkpoint: one of another time is another; None: whichever lies there."""


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


class DestinationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An inference server that the models of an owner are sent to."""

    owner: str = ""
    """Empty: nobody's, of a file that is older than owners of servers."""
    host: str
    port: int
    world_size: int = 1
    pool: str = "default"
    api_key: str | None = None

    def __repr__(self) -> str:
        return f"DestinationRecord({self.host}:{self.port})"


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
    ended: float = 0.0
    """When, in seconds since the epoch."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a numbered work of a model ended."""

    seq: int
    kind: str
    """The name of its type."""
    end: Answer | Failure
    """As it was told; the ask's id is nobody's."""


class LaneLeft(msgspec.Struct, frozen=True, kw_only=True):
    """Of the works of a model."""

    next: int = 1
    """The number that is to come."""
    ended: tuple[Ended, ...] = ()
    """Those whose ends are kept, the oldest first."""


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine that was stopped leaves to the next, so that works that are asked for again
    are not done again."""

    lanes: dict[str, LaneLeft] = {}
    """By the model."""
    untouched: dict[str, CreateModel] = {}
    """Models that nothing was asked of since they were made, and how that was asked for."""


def record_of(work: CreateModel, owner: str) -> ModelRecord:
    """A model as it is asked for, before the workers are."""
    now = time.time()
    return ModelRecord(
        model=work.model,
        session=work.session,
        owner=owner,
        base_model="",
        lora=work.lora,
        optimizer_config=work.optimizer_config,
        user_metadata=work.user_metadata,
        created=now,
        last_request=now,
    )
