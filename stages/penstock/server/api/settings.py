"""What the HTTP side is told of how to serve. No file and no environment is read here."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """How the API process serves; names as in the server's settings where they have one."""

    keys: tuple[str, ...] = ()
    """Keys that are let in; empty: everybody, as one owner, by names of this machine alone."""
    max_request_bytes: int = 256 << 20
    """Of one body, as it is sent and as it is when it is unpacked."""
    max_pending_requests: int = 100
    """Futures of one owner that are not done."""
    requests_per_minute: int = 0
    """Of one owner, heartbeats and polls apart; 0: as many as come."""
    max_connections: int = 1024
    """That are open at a time, of all."""
    operation_timeout: float = 1800.0
    """Seconds that a call that is answered at once, but is done by workers, may take."""
    answer_timeout: float = 30.0
    """Seconds that the engine may take to answer what no worker is needed for."""
    poll_seconds: float = 30.0
    """Seconds that a poll for a future waits; below the 45 s after which clients give up."""
    future_ttl: float = 3600.0
    """Seconds that a result is kept for."""
    max_kept_bytes: int = 256 << 20
    """Of results; beyond it the oldest of the owner with most of them are dropped."""
    sync_after_step: bool = False
    """Whether each step of a client asks for its weights to be sent to inference servers."""
    max_inline_bytes: int = 1 << 20
    """Results over it are announced by their size where a client allows it."""
    idle_session_timeout: float = 7200.0
    """Told to clients; the engine keeps to it."""
