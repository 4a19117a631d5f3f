"""Persistent state of the scheduler: one file per session and per model, and one for all inference
servers.

The files are in `{output_dir}/server/`, in JSON (the shutdown state is msgpack), with a digest of
their content, and are written atomically. Records change in memory first; the caller then saves
them here.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from penstock.core.files import atomic_write, remove
from penstock.server.protocol.envelopes import Failure, Response
from penstock.server.protocol.requests import CreateModel
from penstock.server.protocol.secret import write_secret
from penstock.server.protocol.types import LoraConfig, OptimizerConfig, common_fields
from penstock.server.protocol.worker_commands import CreateModelCommand


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint of a model, stored under its folder and name."""

    time: float  # Seconds since the epoch
    size: int
    base_model: str
    lora: LoraConfig | None = None  # The model's LoRA config at that time; None: full fine-tuning
    step: int = 0  # Number of optimizer steps
    expires: float | None = None
    public: bool = False
    sampler: str | None = None  # The sampler that it is deleted with; None: independent
    user_metadata: dict[str, str] = {}


class ResumePoint(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint from which a model is restored if the workers die."""

    path: str
    optimizer: bool
    time: float | None = None
    """Time of the checkpoint, which identifies it; None: any checkpoint at the path."""


class ModelRecord(msgspec.Struct, kw_only=True):
    """A model that is or was trained."""

    model: str
    session: str
    owner: str
    base_model: str
    lora: LoraConfig | None
    optimizer_config: OptimizerConfig
    user_metadata: dict[str, str]
    created: float
    last_request: float
    is_open: bool = False  # Whether the workers hold it, or are to hold it again
    instance: str = ""  # The workers instance that holds it
    start: ResumePoint | None = None  # None: restored from its initial state
    is_unsaved: bool = False  # Whether it has changed since `start`
    corrupted: bool = False
    """Whether state that a client has seen was lost, and not yet reported to the client."""
    step: int = 0  # Number of optimizer steps at `start`
    state_bytes: int = 0  # Bytes of a checkpoint, as reported by the workers
    export_bytes: int = 0
    closing: str = ""  # Why it is unloaded
    checkpoints: dict[str, CheckpointRecord] = {}  # By `weights/<name>` or `sampler_weights/<name>`


class EndpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An inference server of an owner."""

    owner: str = ""  # Empty: no owner, in a file that predates owners of inference servers
    host: str
    port: int
    world_size: int = 1
    pool: str = "default"
    api_key: str | None = None

    def __repr__(self) -> str:
        return f"EndpointRecord({self.host}:{self.port})"


class SamplerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The model of a sampler."""

    base_model: str
    path: str | None


class SessionRecord(msgspec.Struct, kw_only=True):
    """A client's session."""

    session: str
    owner: str
    created: float
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, str] = {}
    samplers: dict[str, SamplerRecord] = {}
    has_ended: bool = False
    ending: str = ""  # Why it has ended
    ended: float = 0.0  # End time in seconds since the epoch


class CompletedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a request with a sequence number."""

    seq: int
    kind: str  # The name of its type
    end: Response | Failure  # The reply; its request id is unused


class QueueState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a model's queue."""

    next: int = 1  # The next sequence number
    ended: tuple[CompletedRequest, ...] = ()  # Stored outcomes, oldest first


class ShutdownState(msgspec.Struct, frozen=True, kw_only=True):
    """State left by a stopped scheduler, so that repeated requests are not run again."""

    lanes: dict[str, QueueState] = {}  # By model
    untouched: dict[str, CreateModel] = {}
    """Creation requests of models that received no request since."""


def build_create_command(record: ModelRecord) -> CreateModelCommand:
    """The command that creates this model in workers."""
    return CreateModelCommand(**common_fields(record, CreateModelCommand))


R = TypeVar("R")

LOG = logging.getLogger(__name__)

_RUNNING = "running.json"
_LEFT = "left.msgpack"
_DIGEST = "digest"
_DIGEST_MAGIC = b"XXH3"  # Prefix of a binary file, followed by 16 bytes of digest of the rest


class StateStoreError(ValueError):
    """A state file is damaged."""


class StateStore:
    """Sessions and models by name, and inference servers."""

    def __init__(self, output_dir: Path) -> None:
        """Read the state files. Raises StateStoreError naming an invalid file."""
        self._folder = output_dir / "server"
        self._folder.mkdir(parents=True, exist_ok=True)
        self.sessions: dict[str, SessionRecord] = {
            record.session: record for record in self._read("sessions", SessionRecord)
        }
        self.models: dict[str, ModelRecord] = {
            record.model: record for record in self._read("models", ModelRecord)
        }
        self.endpoints: tuple[EndpointRecord, ...] = (
            _read_file(self._endpoints_file, tuple[EndpointRecord, ...])
            if self._endpoints_file.exists()
            else ()
        )

    def save_session(self, record: SessionRecord) -> None:
        self.sessions[record.session] = record
        self._write("sessions", record.session, record)

    def save_model(self, record: ModelRecord) -> None:
        self.models[record.model] = record
        self._write("models", record.model, record)

    def delete_session(self, session: str) -> None:
        del self.sessions[session]
        remove(self._file("sessions", session))

    def delete_model(self, model: str) -> None:
        del self.models[model]
        remove(self._file("models", model))

    def save_endpoints(self, endpoints: tuple[EndpointRecord, ...]) -> None:
        """Save all inference servers, in a file for this user alone, as it contains keys."""
        self.endpoints = endpoints
        write_secret(self._endpoints_file, json.dumps(msgspec.to_builtins(endpoints), indent=1))

    def begin(self, model: str) -> None:
        """Record that the workers are about to change this model. If this process dies before
        `end`, the outcome is unknown. The note survives the process but is not fsynced: the
        workers' state does not survive the machine, either."""
        (self._folder / _RUNNING).write_text(json.dumps({"model": model}))

    def end(self) -> None:
        (self._folder / _RUNNING).unlink(missing_ok=True)

    def read_interrupted_change(self) -> str | None:
        """The model that was being changed when the last process died."""
        try:
            content = json.loads((self._folder / _RUNNING).read_text())
        except (FileNotFoundError, ValueError):
            return None
        return content.get("model") if isinstance(content, dict) else None

    def write_shutdown_state(self, state: ShutdownState) -> None:
        with atomic_write(self._folder / _LEFT) as part:
            content = msgspec.msgpack.encode(state)
            part.write_bytes(_DIGEST_MAGIC + xxhash.xxh3_128_digest(content) + content)

    def take_shutdown_state(self) -> ShutdownState:
        """Read and delete the shutdown state of the last process. Empty if another version wrote it
        in another format: repeated requests are then run again."""
        file = self._folder / _LEFT
        if not file.exists():
            return ShutdownState()
        try:
            state = _read_file(file, ShutdownState, _decode_shutdown_state)
        except StateStoreError as error:
            LOG.warning("%s", error)
            state = ShutdownState()
        remove(file)
        return state

    @property
    def _endpoints_file(self) -> Path:
        return self._folder / "endpoints.json"

    def _file(self, kind: str, name: str) -> Path:
        # Names may differ only in case and contain colons, which some file systems do not support.
        digest = hashlib.sha256(name.encode()).hexdigest()[:12]
        readable = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:80]
        return self._folder / kind / f"{readable}-{digest}.json"

    def _read(self, kind: str, of: type[R]) -> list[R]:
        files = sorted((self._folder / kind).glob("*.json"))
        return [_read_file(file, of, _decode_record) for file in files]

    def _write(self, kind: str, name: str, record: ModelRecord | SessionRecord) -> None:
        with atomic_write(self._file(kind, name)) as part:
            # The digest is of the record as JSON returns it, which is all that a reader has.
            content = msgspec.json.decode(msgspec.json.encode(record))
            content[_DIGEST] = _compute_digest(content)
            part.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))


def _read_file(file: Path, of: type[R], decode: Callable[..., R] = msgspec.json.decode) -> R:
    try:
        return decode(file.read_bytes(), type=of)
    except msgspec.MsgspecError as error:
        raise StateStoreError(
            f"{file} is not what the server writes there: {error}.\n"
            "  Restore it, or move it away to continue without its content."
        ) from error


def _decode_record(content: bytes, type: type[R]) -> R:
    """Decode a file that may predate digests."""
    record = msgspec.json.decode(content)
    if isinstance(record, dict) and _DIGEST in record:
        digest = record.pop(_DIGEST)
        if digest != _compute_digest(record):
            raise msgspec.DecodeError("it differs from its digest")
    return msgspec.convert(record, type=type, str_keys=True)


def _decode_shutdown_state(content: bytes, type: type[R]) -> R:
    """Decode a file that may predate digests."""
    if content.startswith(_DIGEST_MAGIC):
        digest, content = content[4:20], content[20:]
        if digest != xxhash.xxh3_128_digest(content):
            raise msgspec.DecodeError("it differs from its digest")
    return msgspec.msgpack.decode(content, type=type)


def _compute_digest(record: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(record, order="sorted"))
