"""The API and the processes of a training server: part of its flat file."""

import ipaddress
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from penstock.config.schema.base import PATH, ConfigSection, require
from penstock.config.schema.pipeline import variable_names

LAST_PORT = 65535


class ServerServing(ConfigSection):
    """API, sessions and processes."""

    api_host: str = Field(default="127.0.0.1", min_length=1)
    """Address on which the API listens. API keys are required on any address but loopback."""

    api_port: int = Field(default=8000, ge=0, le=LAST_PORT)
    """Port of the API; 0: any free port."""

    api_keys_file: Annotated[str | None, PATH] = Field(default=None, min_length=1)
    """File with one API key per line; other users must not be able to read it. Unset: the
    comma-separated keys in the environment variable `PENSTOCK_SERVER_KEYS`; without any, all users
    of this machine have access as one owner."""

    max_pending_requests: int = Field(default=100, gt=0)
    """Maximum number of waiting and running requests of one owner; more get an error and must be
    retried."""

    max_connections: int = Field(default=1024, ge=4)
    """Maximum number of open client connections, or fewer if the process may not open that many
    files. At the limit, connections that have not sent an API key are closed first."""

    max_request_mb: int = Field(default=256, gt=0, le=1024)
    """Maximum size of a request body in MB, after decompression."""

    requests_per_minute: int = Field(default=0, ge=0)
    """Rate limit: requests of one owner per minute, without polls and heartbeats; 0: no limit."""

    max_models: int = Field(default=256, gt=0)
    """Maximum number of open models. Each has its adapter, gradients and optimizer states on the
    workers."""

    max_owner_models: int = Field(default=64, gt=0)
    """Maximum number of open models of one owner."""

    max_sessions: int = Field(default=10_000, gt=0)
    """Maximum number of open sessions."""

    max_owner_sessions: int = Field(default=1000, gt=0)
    """Maximum number of open sessions of one owner."""

    operation_timeout: float = Field(default=1800.0, gt=0)
    """Timeout of one operation on the workers, in seconds; after it the workers are restarted."""

    future_ttl: float = Field(default=3600.0, gt=0)
    """Seconds for which the result of a request is kept for its client."""

    sequence_gap_timeout: float = Field(default=30.0, gt=0)
    """Seconds for which a request waits for requests of its model with lower sequence numbers."""

    idle_session_timeout: float = Field(default=7200.0, gt=0)
    """Seconds without a request or heartbeat after which a session is saved and unloaded."""

    worker_bind_host: str = Field(default="127.0.0.1", min_length=1)
    """Address on which rank 0 listens for the scheduler. Rank 0 runs on the first node, like the
    scheduler, so another address is useful only with `--mode workers`, whose scheduler runs
    elsewhere."""

    worker_bind_port: int = Field(default=5556, ge=0, le=LAST_PORT)
    """Port of rank 0. 0, or neither this nor `worker_bind_address` is written: any free port, and
    5556 with `--mode workers`."""

    engine_connect_host: str | None = Field(default=None, min_length=1)
    """Address at which the scheduler connects to rank 0. Unset: `worker_bind_host`, or loopback if
    that is all addresses."""

    worker_bind_address: Annotated[
        str,
        Field(pattern=r"^(auto|tcp://.+:[0-9]+)$"),
        require(
            lambda address: address == "auto" or int(address.rpartition(":")[2]) <= LAST_PORT,
            f"is {{value}}; ports end at {LAST_PORT}",
        ),
    ] = "auto"
    """Address and port on which rank 0 listens: `tcp://host:port`. `auto`: `worker_bind_host` and
    `worker_bind_port`."""

    worker_connection_timeout: float = Field(default=120.0, gt=0)
    """Seconds without a message from the workers after which they are considered lost."""

    worker_max_retries: int = Field(default=3, ge=0)
    """How often an operation that was lost with its workers is retried, if the model is in the
    state before it. 0: the client gets an error."""

    worker_max_restarts: int | None = Field(default=None, ge=0)
    """How often in a row workers that died are restarted. Unset: 10, or `worker_max_retries` + 1 if
    that is more."""

    nproc_per_node: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Workers on each node. `auto`: the product of the parallel sizes; if one of them is -1, one
    for each GPU."""

    nnodes: int = Field(default=1, gt=0)
    """Number of nodes (machines) that train together. Start each with this file; the first serves
    the API."""

    node_rank: int = Field(default=0, ge=0)
    """Rank of this node, from 0."""

    master_addr: str | None = Field(default=None, min_length=1)
    """Host name or address of the first node. Required with several nodes."""

    master_port: int = Field(default=29500, gt=0, le=LAST_PORT)
    """Free port on the first node, for several nodes."""

    stop_timeout: float = Field(default=60.0, gt=0)
    """Seconds to save unsaved models when the server is stopped, and as many for its workers to
    exit after that. Raise it if many or large models are trained."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Log level of all processes."""

    enable_self_test: bool = False
    """Run a forward and backward pass when the workers start, before any client is served."""

    sync_inference_method: Literal["nccl_broadcast"] = "nccl_broadcast"
    """Weight sync: how weights are sent to inference servers."""

    sync_after_step: bool = False
    """Weight sync: after each step, send a model's weights to those inference servers of its owner
    that are in the pool `default` or in a pool with the model's name."""

    sync_allowed_hosts: list[str] = Field(default_factory=list[str])
    """Weight sync: inference servers that weights may be sent to: host names and addresses as
    clients write them, with a port (`infer-1:30000`) or without (all ports), and networks
    (`10.0.0.0/8`). If clients have no keys, also those on this machine."""

    @property
    def max_restarts(self) -> int:
        if self.worker_max_restarts is not None:
            return self.worker_max_restarts
        return max(10, self.worker_max_retries + 1)

    pass_env: Annotated[list[str], AfterValidator(variable_names)] = Field(
        default_factory=list[str]
    )
    """Names of further environment variables of the launcher that are passed to the workers. Those
    of the system, compilers, CUDA and torch are always passed. No other process of the server gets
    more."""

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
