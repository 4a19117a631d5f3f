"""API settings. Reads no files and no environment variables."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """Settings of the API process, named as in the server config."""

    keys: tuple[str, ...] = ()
    """Valid API keys; empty: no authentication, one owner, and only this machine's host names."""
    image_processor: str = ""
    """Folder of the model's image processor; empty: samples have no images."""
    max_request_bytes: int = 256 << 20  # Maximum bytes of one body, compressed and decompressed
    max_pending_requests: int = 100  # Maximum pending futures per owner
    requests_per_minute: int = 0
    """Requests per minute and owner, without heartbeats and polls; 0: unlimited."""
    max_connections: int = 1024  # Maximum number of open connections, over all owners
    operation_timeout: float = 1800.0  # Timeout in seconds of calls that wait for workers
    answer_timeout: float = 30.0
    """Timeout in seconds of calls that the scheduler answers without workers."""
    poll_seconds: float = 30.0
    """Duration in seconds of a poll for a future; below the 45 s after which clients give up."""
    future_ttl: float = 3600.0  # Time to live of a result in seconds
    max_result_bytes: int = 256 << 20
    """Maximum bytes of results; beyond it the oldest of the owner with the most are dropped."""
    sync_after_step: bool = False
    """Whether each optimizer step triggers a weight sync to the inference servers."""
    max_inline_bytes: int = 1 << 20
    """Larger results are announced by their size if the client allows it."""
    idle_session_timeout: float = 7200.0  # Reported to clients; enforced by the scheduler
