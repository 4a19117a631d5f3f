"""Server job file, read by all server processes. No torch. It contains no secrets; those are passed
in the environment (`penstock.core.env`)."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from penstock.config.server.config import ServerConfig
from penstock.core.files import atomic_write, read_json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")

FOLDER = "server"  # State folder of the server processes in the output folder
JOB = "job.json"
GIVEN_UP = "workers-given-up"  # File that exists while the launcher no longer restarts workers

Mode = Literal["auto", "connect", "workers"]
"""auto: the launcher starts all processes; connect: all but the workers; workers: only workers."""


@dataclass(frozen=True, kw_only=True)
class ServerJob:
    """The config, local paths, and addresses."""

    config: ServerConfig
    mode: Mode
    output_dir: Path  # `config.output_dir` as an absolute path
    config_path: str  # A local folder with the model's config.json, or `builtin:<name>`
    weights: Path | None  # A local folder of safetensors; None initializes from the seed
    tokenizer: str  # A local folder, or `builtin:<name>`
    api_host: str
    api_port: int  # The port of the API; never 0
    engine_address: str  # `tcp://...`: bound by the scheduler (ROUTER); the API connects to it
    workers_bind: str  # `tcp://...`: bound by rank 0 (ROUTER)
    workers_address: str  # `tcp://...`: the same address as reached by the scheduler
    requires_keys: bool = False  # Whether clients of the API need keys
    image_processor: str = ""
    """A local folder with the model's image processor; empty: the model takes no images."""

    @property
    def folder(self) -> Path:
        return self.output_dir / FOLDER

    def write(self, name: str = JOB) -> Path:
        """Write the job file, readable only by its owner; return its path."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / name
        with atomic_write(path) as part:
            part.touch(mode=0o600)
            # `touch` leaves the mode of an existing file, as an interrupted write leaves one.
            part.chmod(0o600)
            record = asdict(self) | {
                # Only explicitly set fields: a reader must distinguish user settings from defaults.
                "config": self.config.model_dump(mode="json", exclude_unset=True),
                "output_dir": str(self.output_dir),
                "weights": str(self.weights) if self.weights else None,
            }
            text = json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False)
            part.write_text(text + "\n", encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> "ServerJob":
        record: dict[str, Any] = read_json(path)
        record["config"] = ServerConfig.model_validate(record["config"])
        record["output_dir"] = Path(record["output_dir"])
        record["weights"] = Path(record["weights"]) if record["weights"] else None
        return cls(**record)


def select_settings(config: ServerConfig, kind: type[S], **own: Any) -> S:
    """The settings of a process, a dataclass: fields as in the config, and its `own` values."""
    names = {field.name for field in fields(kind)} & ServerConfig.model_fields.keys()
    return kind(**{name: getattr(config, name) for name in names} | own)
