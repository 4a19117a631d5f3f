"""What the engine knows, in files that outlive it: one for each session and each model, and one for
all inference servers.

They lie in `{output_dir}/server/`, are JSON (what a stopped engine leaves to the next is msgpack),
carry a digest of what they say, and are whole or absent. Records change in memory first; whoever
changes one has it kept here.
"""

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from penstock.core.files import atomic_write, remove
from penstock.server.protocol.envelopes import Answer, Failure
from penstock.server.protocol.requests import CreateModel
from penstock.server.protocol.secret import write_secret
from penstock.server.protocol.types import Lora, Optimizer


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True):
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
    checkpoints: dict[str, CheckpointRecord] = {}
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


class CompletedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """How a numbered work of a model ended."""

    seq: int
    kind: str
    """The name of its type."""
    end: Answer | Failure
    """As it was told; the ask's id is nobody's."""


class QueueState(msgspec.Struct, frozen=True, kw_only=True):
    """Of the works of a model."""

    next: int = 1
    """The number that is to come."""
    ended: tuple[CompletedRequest, ...] = ()
    """Those whose ends are kept, the oldest first."""


class ShutdownState(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine that was stopped leaves to the next, so that works that are asked for again
    are not done again."""

    lanes: dict[str, QueueState] = {}
    """By the model."""
    untouched: dict[str, CreateModel] = {}
    """Models that nothing was asked of since they were made, and how that was asked for."""


def build_model_record(work: CreateModel, owner: str) -> ModelRecord:
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


R = TypeVar("R")

LOG = logging.getLogger(__name__)

_RUNNING = "running.json"
_LEFT = "left.msgpack"
_DIGEST = "digest"
_DIGESTED = b"XXH3"
"""A binary file begins with this and 16 bytes of digest of the rest."""


class RegistryError(ValueError):
    """A file of the registry is not what was written there."""


class Registry:
    """Sessions and models by their names, and inference servers."""

    def __init__(self, output_dir: Path) -> None:
        """Read what is there. Raises RegistryError naming a file that is none of ours."""
        self._folder = output_dir / "server"
        self._folder.mkdir(parents=True, exist_ok=True)
        self.sessions: dict[str, SessionRecord] = {
            record.session: record for record in self._read("sessions", SessionRecord)
        }
        self.models: dict[str, ModelRecord] = {
            record.model: record for record in self._read("models", ModelRecord)
        }
        self.destinations: tuple[DestinationRecord, ...] = (
            _decoded(self._destinations, tuple[DestinationRecord, ...])
            if self._destinations.exists()
            else ()
        )

    def keep_session(self, record: SessionRecord) -> None:
        """Of a session that is new or has changed."""
        self.sessions[record.session] = record
        self._write("sessions", record.session, record)

    def keep_model(self, record: ModelRecord) -> None:
        """Of a model that is new or has changed."""
        self.models[record.model] = record
        self._write("models", record.model, record)

    def drop_session(self, session: str) -> None:
        """Nothing is known of it any more."""
        del self.sessions[session]
        remove(self._file("sessions", session))

    def drop_model(self, model: str) -> None:
        """Nothing is known of it any more."""
        del self.models[model]
        remove(self._file("models", model))

    def keep_destinations(self, destinations: tuple[DestinationRecord, ...]) -> None:
        """All there are, in a file that nobody else may read: there are keys among them."""
        self.destinations = destinations
        write_secret(self._destinations, json.dumps(msgspec.to_builtins(destinations), indent=1))

    def begin(self, model: str) -> None:
        """Workers are told to change this model.

        If this process dies before the end is written, whether they did is not known. The system
        keeps the note when the process dies; that it outlives the machine, too, is of no use, as
        what it speaks of does not.
        """
        (self._folder / _RUNNING).write_text(json.dumps({"model": model}))

    def end(self) -> None:
        """They are done."""
        (self._folder / _RUNNING).unlink(missing_ok=True)

    def interrupted(self) -> str | None:
        """The model that workers were told to change when the last process died."""
        try:
            found = json.loads((self._folder / _RUNNING).read_text())
        except (FileNotFoundError, ValueError):
            return None
        return found.get("model") if isinstance(found, dict) else None

    def leave(self, left: ShutdownState) -> None:
        """This process ends in order, and the next is to know this."""
        with atomic_write(self._folder / _LEFT) as part:
            content = msgspec.msgpack.encode(left)
            part.write_bytes(_DIGESTED + xxhash.xxh3_128_digest(content) + content)

    def take_left(self) -> ShutdownState:
        """What the last process left, if that was stopped; it is told once. Nothing, where another
        version wrote it otherwise: then works that are asked for again are done again."""
        file = self._folder / _LEFT
        if not file.exists():
            return ShutdownState()
        try:
            left = _decoded(file, ShutdownState, _decode_left)
        except RegistryError as error:
            LOG.warning("%s", error)
            left = ShutdownState()
        remove(file)
        return left

    @property
    def _destinations(self) -> Path:
        return self._folder / "endpoints.json"

    def _file(self, kind: str, name: str) -> Path:
        # Names may differ by case alone, and hold colons, which not every file system tells apart
        # or takes.
        digest = hashlib.sha256(name.encode()).hexdigest()[:12]
        readable = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:80]
        return self._folder / kind / f"{readable}-{digest}.json"

    def _read(self, kind: str, of: type[R]) -> list[R]:
        files = sorted((self._folder / kind).glob("*.json"))
        return [_decoded(file, of, _decode_record) for file in files]

    def _write(self, kind: str, name: str, record: ModelRecord | SessionRecord) -> None:
        with atomic_write(self._file(kind, name)) as part:
            content = msgspec.json.decode(msgspec.json.encode(record))
            content[_DIGEST] = _digest_of(content)
            part.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))


def _decoded(file: Path, of: type[R], decode: Callable[..., R] = msgspec.json.decode) -> R:
    try:
        return decode(file.read_bytes(), type=of)
    except msgspec.MsgspecError as error:
        raise RegistryError(
            f"{file} is not what the server writes there: {error}.\n"
            "  Put it back as it was, or move it away to go on without what it told."
        ) from error


def _decode_record(content: bytes, type: type[R]) -> R:
    """Of a file that may be older than digests."""
    found = msgspec.json.decode(content)
    if isinstance(found, dict) and _DIGEST in found:
        digest = found.pop(_DIGEST)
        if digest != _digest_of(found):
            raise msgspec.DecodeError("it differs from its digest")
    return msgspec.convert(found, type=type, str_keys=True)


def _decode_left(content: bytes, type: type[R]) -> R:
    """Of a file that may be older than digests."""
    if content.startswith(_DIGESTED):
        digest, content = content[4:20], content[20:]
        if digest != xxhash.xxh3_128_digest(content):
            raise msgspec.DecodeError("it differs from its digest")
    return msgspec.msgpack.decode(content, type=type)


def _digest_of(record: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(record, order="sorted"))
