"""Scheduler settings. Reads no files and no environment variables."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Strategy = Literal["sequential", "best_fit", "balanced_dp"]  # Packing strategy; see `pack_rows`


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """Settings of the scheduler process, named as in the server config."""

    output_dir: Path  # Folder of all persistent state
    base_names: tuple[str, ...] = ()
    """Names of the base model that clients may use, besides the name that the workers report."""
    storage_limit: int = 10 * 10**12  # Bytes of `output_dir` above which nothing is saved
    skip_initial_checkpoint: bool = False
    idle_session_timeout: float = 7200.0
    """Seconds without client activity after which a session is saved and unloaded."""
    sequence_gap_timeout: float = 30.0  # Seconds that a request waits for lower sequence numbers
    sample_packing_sequence_len: int = 32_000
    enable_packing: bool = True
    sample_packing_strategy: Strategy = "sequential"
    max_models: int = 256  # Maximum loaded models
    max_owner_models: int = 64  # Maximum loaded models per owner
    max_sessions: int = 10_000  # Maximum sessions that have not ended
    max_owner_sessions: int = 1000  # The same per owner
    stop_timeout: float = 60.0
    """Seconds for running requests to end and models to be saved on shutdown."""
    ends_workers: bool = False
    """Whether the workers are stopped together with the scheduler and the API."""
    worker_connection_timeout: float = 120.0
    """Seconds without worker heartbeat after which the workers count as lost."""
    worker_max_retries: int = 3  # Retries of an operation that was lost with the workers
    worker_max_restarts: int = 10  # Maximum consecutive losses of the workers
    operation_timeout: float = 1800.0
    """Timeout in seconds of one command, after which the workers count as lost."""
    sync_allowed_hosts: Sequence[str] = ()  # Hosts that weights may be sent to
    requires_keys: bool = False
    """Whether clients need keys. Without keys, weights may also be sent to this machine."""
    given_up: Path | None = None  # File that exists once workers are no longer restarted
    max_joined_samples: int = 256  # Maximum sampling requests that run together
    status_interval: float = 1.0
    """Seconds between status messages, and between hello messages to workers that do not answer."""
