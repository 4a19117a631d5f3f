"""How a training server's processes serve clients and reach one another: part of its flat file."""

import ipaddress
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.pipeline import variable_names

LAST_PORT = 65535


class ServerServing(ConfigSection):
    """The API, sessions, and the wire between processes."""

    api_host: str = Field(default="127.0.0.1", min_length=1)
    """Where the API listens. On any address but loopback keys are required."""

    api_port: int = Field(default=8000, ge=0, le=LAST_PORT)
    """Port of the API; 0 takes a free one."""

    api_keys_file: str | None = Field(default=None, min_length=1)
    """A file with a key of the API on each line, that others may not read. Unset: the keys in the
    environment variable `PENSTOCK_SERVER_KEYS`, parted by commas; without any, everybody on this
    machine is let in as one owner."""

    max_pending_requests: int = Field(default=100, gt=0)
    """Requests of one owner that may wait or run at a time; more are told to come again."""

    max_connections: int = Field(default=1024, ge=4)
    """Connections of clients that may be open at a time; as many less as the process may have
    files open. Beyond it those that have shown no key are closed first."""

    max_request_mb: int = Field(default=256, gt=0, le=1024)
    """Largest body of a request, unpacked."""

    requests_per_minute: int = Field(default=0, ge=0)
    """Requests of one owner in a minute, polls and heartbeats apart; 0: as many as come."""

    max_models: int = Field(default=256, gt=0)
    """Models that may be open at a time: each has its adapter, gradients and optimizer's states at
    the workers. One more is refused before any work."""

    max_owner_models: int = Field(default=64, gt=0)
    """Models of one owner that may be open at a time."""

    max_sessions: int = Field(default=10_000, gt=0)
    """Sessions that may be open at a time; one more is refused."""

    max_owner_sessions: int = Field(default=1000, gt=0)
    """Sessions of one owner that may be open at a time."""

    operation_timeout: float = Field(default=1800.0, gt=0)
    """Seconds that one operation may take at the workers, after which they are started again."""

    future_ttl: float = Field(default=3600.0, gt=0)
    """Seconds that a result is kept for its client."""

    sequence_gap_timeout: float = Field(default=30.0, gt=0)
    """Seconds that a request waits for those of its model that are numbered before it."""

    idle_session_timeout: float = Field(default=7200.0, gt=0)
    """Seconds without a word of its client after which a session is saved and unloaded."""

    worker_bind_host: str = Field(default="127.0.0.1", min_length=1)
    """Where rank 0 listens for the engine: it runs on the first machine, beside the engine, also
    where there are several. Another address only serves `--mode workers`, whose engine is
    elsewhere."""

    worker_bind_port: int = Field(default=5556, ge=0, le=LAST_PORT)
    """Port of rank 0. Where neither it nor `worker_bind_address` is written, or it is 0, a free
    one; `--mode workers` takes 5556 then."""

    engine_connect_host: str | None = Field(default=None, min_length=1)
    """Where the engine reaches rank 0. Unset: `worker_bind_host`, by loopback where that is every
    address."""

    worker_bind_address: str = Field(default="auto", pattern=r"^(auto|tcp://.+:[0-9]+)$")
    """Where rank 0 listens, in full: `tcp://host:port`. `auto`: as host and port say."""

    worker_connection_timeout: float = Field(default=120.0, gt=0)
    """Seconds without a word of the workers after which they are taken for lost."""

    worker_max_retries: int = Field(default=3, ge=0)
    """How often an operation that was lost with its workers is tried again, where the model is then
    as it was before. 0: its client is told that it was lost."""

    worker_max_restarts: int | None = Field(default=None, ge=0)
    """How often in a row workers that died are started again. Unset: 10, or one more than
    `worker_max_retries` where that is more."""

    nproc_per_node: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Workers on each machine. `auto`: as many as the parallel sizes multiply to; where one of them
    is -1, one for each GPU."""

    nnodes: int = Field(default=1, gt=0)
    """Machines that train together. Each is started with this file; the first serves."""

    node_rank: int = Field(default=0, ge=0)
    """Number of this machine among them, from 0."""

    master_addr: str | None = Field(default=None, min_length=1)
    """Name or address of the first machine, where there are several."""

    master_port: int = Field(default=29500, gt=0, le=LAST_PORT)
    """A free port of the first machine, where there are several."""

    stop_timeout: float = Field(default=60.0, gt=0)
    """Seconds in which unsaved models are saved when the server is stopped, and as many in which
    its workers end then. Raise it where many or large models are trained."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """What processes tell of themselves, at least."""

    enable_self_test: bool = False
    """Try a forward and backward pass when the workers start, before any client is served."""

    sync_inference_method: Literal["nccl_broadcast"] = "nccl_broadcast"
    """How weights are sent to inference servers."""

    sync_after_step: bool = False
    """Send a model's weights after each step to the inference servers of its owner that are in the
    pool `default`, or in one of the model's name."""

    sync_allowed_hosts: list[str] = Field(default_factory=list[str])
    """Inference servers that weights may be sent to: names and addresses as clients write them,
    with a port (`infer-1:30000`) or for all ports, and networks (`10.0.0.0/8`). Where clients have
    no keys, also those on this machine."""

    @property
    def max_restarts(self) -> int:
        """`worker_max_restarts` as a number."""
        if self.worker_max_restarts is not None:
            return self.worker_max_restarts
        return max(10, self.worker_max_retries + 1)

    pass_env: Annotated[list[str], AfterValidator(variable_names)] = Field(
        default_factory=list[str]
    )
    """Names of environment variables of the launcher that the workers get besides those of the
    system, compilers, CUDA and torch. No process of the server gets others."""

    @field_validator("worker_bind_address")
    @classmethod
    def _has_a_port(cls, value: str) -> str:
        if value != "auto" and int(value.rpartition(":")[2]) > LAST_PORT:
            raise ValueError(f"is {value}; ports end at {LAST_PORT}")
        return value

    @field_validator("sync_allowed_hosts")
    @classmethod
    def _are_hosts(cls, value: list[str]) -> list[str]:
        for name in value:
            if not name.strip() or name != name.strip() or "://" in name:
                raise ValueError(
                    f"has {name!r}; write names and addresses alone, such as infer-1.internal"
                )
            if "/" in name:
                try:
                    ipaddress.ip_network(name)
                except ValueError as error:
                    raise ValueError(
                        f"has {name}, which is no network: {error}; write one such as 10.0.0.0/8"
                    ) from error
        return value
