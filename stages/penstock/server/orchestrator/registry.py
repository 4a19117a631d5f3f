"""What the engine knows, in files that outlive it: one for each session, model, and the endpoints.

They lie in `{output_dir}/server/`, are JSON, and are whole or absent. Records change in memory
first; whoever changes one has it kept here.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.core.files import publishing, remove, write_json
from penstock.server.orchestrator.records import ModelRecord, SessionRecord
from penstock.server.protocol.values import Endpoint

R = TypeVar("R")

_RUNNING = "running.json"


class RegistryError(ValueError):
    """A file of the registry is not what was written there."""


class Registry:
    """Sessions and models by their names, and endpoints."""

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
        endpoints = self._folder / "endpoints.json"
        self.endpoints: tuple[Endpoint, ...] = (
            _decoded(endpoints, tuple[Endpoint, ...]) if endpoints.exists() else ()
        )

    def keep_session(self, record: SessionRecord) -> None:
        """Of a session that is new or has changed."""
        self.sessions[record.session] = record
        self._write("sessions", record.session, record)

    def keep_model(self, record: ModelRecord) -> None:
        """Of a model that is new or has changed."""
        self.models[record.model] = record
        self._write("models", record.model, record)

    def drop_model(self, model: str) -> None:
        """Nothing is known of it any more."""
        del self.models[model]
        remove(self._file("models", model))

    def keep_endpoints(self, endpoints: tuple[Endpoint, ...]) -> None:
        """All there are."""
        self.endpoints = endpoints
        write_json(self._folder / "endpoints.json", msgspec.to_builtins(endpoints))

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

    def _file(self, kind: str, name: str) -> Path:
        # Names may differ by case alone, and hold colons, which not every file system tells apart
        # or takes.
        digest = hashlib.sha256(name.encode()).hexdigest()[:12]
        readable = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:80]
        return self._folder / kind / f"{readable}-{digest}.json"

    def _read(self, kind: str, of: type[R]) -> list[R]:
        return [_decoded(file, of) for file in sorted((self._folder / kind).glob("*.json"))]

    def _write(self, kind: str, name: str, record: ModelRecord | SessionRecord) -> None:
        with publishing(self._file(kind, name)) as part:
            part.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))


def _decoded(file: Path, of: type[R]) -> R:
    try:
        return msgspec.json.decode(file.read_bytes(), type=of)
    except msgspec.MsgspecError as error:
        raise RegistryError(
            f"{file} is not what the server writes there: {error}.\n"
            "  Put it back as it was, or move it away to go on without what it told."
        ) from error
