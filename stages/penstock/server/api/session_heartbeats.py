"""Session heartbeats.

Heartbeats are answered here and forwarded to the scheduler in batches, so that they do not wait for
a busy scheduler. The scheduler is asked once whether a session exists, and later reports which of
the forwarded sessions have ended.
"""

import asyncio
import logging
import time
from collections import defaultdict
from dataclasses import dataclass, field

from penstock.server.api.errors import ApiError
from penstock.server.api.scheduler_client import SchedulerClient
from penstock.server.protocol.requests import Heartbeat
from penstock.server.protocol.results import HeartbeatResult

LOG = logging.getLogger(__name__)

LONGEST_INTERVAL = 1.0  # Maximum seconds between batches to the scheduler
KEPT_SECONDS = 60.0  # A session without heartbeat for so many seconds is looked up again


@dataclass
class SessionHeartbeats:
    """Sessions with live clients."""

    scheduler: SchedulerClient
    idle_timeout: float  # Seconds without a heartbeat after which a session ends
    answer_timeout: float  # Seconds that the scheduler has to answer
    _heard: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    """Time of the last heartbeat of each known session, by owner and name."""
    _unsent: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    async def beat(self, owner: str, session: str) -> None:
        """Record a heartbeat of a session. Raises ApiError: 410 if the owner has no such session,
        503 if the scheduler is not connected."""
        if (owner, session) in self._heard and self.scheduler.status is not None:
            self._unsent[owner].add(session)
        elif await self._gone(owner, (session,)):
            # The SDK stops its heartbeats on a 410.
            raise ApiError(f"session {session[:200]!r} is not there, or has ended", code="gone")
        self.begin(owner, session)

    def begin(self, owner: str, session: str) -> None:
        """The scheduler has confirmed that the session exists."""
        self._heard[owner, session] = time.monotonic()

    def forget(self, owner: str, session: str) -> None:
        """The session is being ended; the scheduler reports its outcome."""
        self._heard.pop((owner, session), None)

    async def _gone(self, owner: str, sessions: tuple[str, ...]) -> tuple[str, ...]:
        result = await self.scheduler.call(owner, Heartbeat(sessions=sessions), self.answer_timeout)
        assert isinstance(result, HeartbeatResult)
        return result.sessions

    async def forward_periodically(self) -> None:
        while True:
            await asyncio.sleep(min(LONGEST_INTERVAL, self.idle_timeout / 4))
            # Replaced before the first await: heartbeats that arrive meanwhile are in the new one.
            untold, self._unsent = self._unsent, defaultdict(set)
            for owner, sessions in untold.items():
                try:
                    gone = await self._gone(owner, tuple(sessions))
                except Exception as error:  # noqa: BLE001 - an error must not end the sessions
                    # A scheduler that is disconnected or slow is informed the next time.
                    LOG.warning("heartbeats could not be forwarded: %s", error)
                    self._unsent[owner] |= sessions
                    continue
                for session in gone:
                    self.forget(owner, session)
            oldest = time.monotonic() - KEPT_SECONDS
            self._heard = {
                name: heard_at for name, heard_at in self._heard.items() if heard_at > oldest
            }
