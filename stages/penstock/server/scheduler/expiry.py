"""Expiry of idle sessions and of checkpoints. Models of a session are saved before they are
unloaded; a model that cannot be saved stays loaded."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from penstock.server.protocol.requests import UnloadModel
from penstock.server.scheduler.checkpoint_catalog import CheckpointCatalog
from penstock.server.scheduler.models import Models
from penstock.server.scheduler.queue import RequestQueue, Task
from penstock.server.scheduler.sessions import Sessions
from penstock.server.scheduler.state_store import SessionRecord

LONGEST_INTERVAL = 30.0  # Maximum seconds between checks
# Seconds during which requests to an ended session report why; later it is unknown.
ENDED_SESSION_SECONDS = 24 * 3600.0
RETRY_SECONDS = 60.0  # Seconds before unloading a model is retried


@dataclass
class Expiry:
    """Checks for expired sessions and checkpoints."""

    timeout: float  # Seconds without activity after which a session is idle
    queue: RequestQueue
    sessions: Sessions
    models: Models
    checkpoints: CheckpointCatalog
    discard: Callable[[list[Path]], None]  # Deletes folders in the background
    _last_attempts: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def interval(self) -> float:
        """Seconds between checks."""
        return min(LONGEST_INTERVAL, self.timeout / 10)

    def sweep(self) -> None:
        """Unload models of expired sessions, and end sessions that have no model left."""
        for session in self.sessions.open():
            has_open = any(model.is_open for model in self.sessions.models(session.session))
            if self._is_idle(session) and not has_open:
                self.end(session, f"nothing was heard of its client for {self.timeout:g} s")
        self._unload_expired()
        now = time.time()
        self.sessions.forget(now - ENDED_SESSION_SECONDS)
        self.discard(self.checkpoints.expire(now))
        # A session may have ended while one of its samplers was being saved.
        self.discard(self.checkpoints.delete_unused_sampler_weights(self.sessions.has_sampler))

    def end(self, session: SessionRecord, why: str) -> None:
        """End a session; its models are unloaded, and checkpoints of its samplers deleted."""
        self.sessions.end(session, why)
        self.discard(self.checkpoints.delete_unused_sampler_weights(self.sessions.has_sampler))
        self._unload_expired()

    def is_expired(self, model: str) -> bool:
        """Whether a loaded model is to be unloaded because its session has ended."""
        record = self.models.get(model)
        if record is None or not record.is_open:
            return False
        session = self.sessions.get(record.session)
        return session is None or session.has_ended or self._is_idle(session)

    def unload_reason(self, model: str) -> str:
        record = self.models.get(model)
        session = self.sessions.get(record.session) if record else None
        if session is not None and session.has_ended:
            return f"its session has ended: {session.ending}"
        return f"nothing was heard of its client for {self.timeout:g} s"

    def _is_idle(self, session: SessionRecord) -> bool:
        return self.sessions.idle_seconds(session.session) >= self.timeout and not any(
            self.queue.pending_from_clients(record.model)
            for record in self.sessions.models(session.session)
        )

    def _unload_expired(self) -> None:
        now, earlier, self._last_attempts = time.monotonic(), self._last_attempts, {}
        for record in self.models.open():
            model = record.model
            if not self.is_expired(model):
                continue
            last_attempt = earlier.get(model, -math.inf)
            # The requests that are not of clients are those of this class.
            is_unloading = self.queue.pending(model) > self.queue.pending_from_clients(model)
            if not is_unloading and now - last_attempt >= RETRY_SECONDS:
                self.queue.put(
                    Task(UnloadModel(model=model), record.owner, model, is_internal=True)
                )
                last_attempt = now
            self._last_attempts[model] = last_attempt
