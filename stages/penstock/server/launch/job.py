"""What one start of the server is told, as a file that all of its processes read. No torch.

There is no secret in it: those are handed on in the environment (`penstock.core.env`).
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.config.server.config import ServerConfig
from penstock.core.files import atomic_write, read_json

FOLDER = "server"
"""In the output folder: what the server's processes keep of themselves."""
JOB = "job.json"
GIVEN_UP = "workers-given-up"
"""A file that is there while the launcher starts workers no more."""

Mode = Literal["auto", "connect", "workers"]
"""Whether the launcher starts all processes, none of the workers, or the workers alone."""


@dataclass(frozen=True, kw_only=True)
class ServerJob:
    """The settings, what of them lies where on this machine, and who listens where."""

    config: ServerConfig
    mode: Mode
    output_dir: Path
    """`config.output_dir` as a whole path."""
    config_path: str
    """A folder with the model's config.json on this machine, or `builtin:<name>`."""
    weights: Path | None
    """A folder of safetensors on this machine; None starts from the seed."""
    tokenizer: str
    """A folder on this machine, or `builtin:<name>`."""
    api_host: str
    api_port: int
    """Where the API listens; never 0."""
    engine_address: str
    """`tcp://...`: the engine binds it (ROUTER), the API connects to it."""
    workers_bind: str
    """`tcp://...`: rank 0 binds it (ROUTER)."""
    workers_address: str
    """`tcp://...`: the same as the engine connects to it."""
    launch: str
    """Names this start of the launcher."""
    requires_keys: bool = False
    """Whether clients of the API have keys."""

    @property
    def folder(self) -> Path:
        """Where the engine keeps what it knows, one file for each thing."""
        return self.output_dir / FOLDER

    def write(self, name: str = JOB) -> Path:
        """Publish the job as a file that its owner alone may read; return that."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / name
        with atomic_write(path) as part:
            part.touch(mode=0o600)
            part.chmod(0o600)
            part.write_text(_text(self), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> "ServerJob":
        """The job in `path`."""
        record: dict[str, Any] = read_json(path)
        return cls(
            **{
                **record,
                "config": ServerConfig.model_validate(record["config"]),
                "output_dir": Path(record["output_dir"]),
                "weights": Path(record["weights"]) if record["weights"] else None,
            }
        )


def _text(job: ServerJob) -> str:
    record = {
        **asdict(job),
        # Only what was written: a reader must be able to tell a wish from a default.
        "config": job.config.model_dump(mode="json", exclude_unset=True),
        "output_dir": str(job.output_dir),
        "weights": str(job.weights) if job.weights else None,
    }
    return json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
