"""What the engine is told of how to serve. Nothing is read from files or the environment here."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Strategy = Literal["sequential", "best_fit", "balanced_dp"]
"""How samples are laid into rows; see `packing`."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How the engine serves; names as in the server's settings where they have one."""

    output_dir: Path
    """Where all is kept that outlives a process."""
    base_names: tuple[str, ...] = ()
    """What clients may call the base model besides the name that the workers tell."""
    storage_limit: int = 10 * 10**12
    """Bytes of `output_dir` above which nothing is saved."""
    skip_initial_checkpoint: bool = False
    idle_session_timeout: float = 7200.0
    """Seconds without a word of its client after which a session is saved and unloaded."""
    sequence_gap_timeout: float = 30.0
    """Seconds that an ask waits for those whose numbers come before its own."""
    sample_packing_sequence_len: int = 32_000
    enable_packing: bool = True
    sample_packing_strategy: Strategy = "sequential"
    max_models: int = 256
    """That are open at a time."""
    max_owner_models: int = 64
    """The same of one owner."""
    max_sessions: int = 10_000
    """That have not ended."""
    max_owner_sessions: int = 1000
    """The same of one owner."""
    stop_timeout: float = 60.0
    """Seconds in which work under way is to end, and all to be saved, when it is stopped."""
    ends_workers: bool = False
    """Whether the workers are to end when it is stopped with the API."""
    worker_connection_timeout: float = 120.0
    """Seconds without a word of the workers after which they are taken for lost."""
    worker_max_retries: int = 3
    """How often an operation that was lost with the workers is tried again."""
    worker_max_restarts: int = 10
    """How often in a row they may be lost."""
    operation_timeout: float = 1800.0
    """Seconds that one command may take, after which the workers are taken for lost."""
    sync_allowed_hosts: Sequence[str] = ()
    """Whom weights may be sent to."""
    requires_keys: bool = False
    """Whether clients have keys. Without them, weights may be sent to this machine's own, too."""
    given_up: Path | None = None
    """A file that is there once nobody starts workers any more."""
    max_joined_samples: int = 16
    """Asks that one batch of drawing may answer."""
    status_interval: float = 1.0
    """Seconds between two words of how the engine is, and between two greetings of workers that do
    not answer."""
