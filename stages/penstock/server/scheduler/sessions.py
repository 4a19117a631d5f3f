"""Client sessions: ownership, liveness, their models and samplers. Nothing needs workers."""

import time
import uuid

from penstock.server.protocol.requests import CreateSession
from penstock.server.scheduler.checkpoint_names import SAMPLER, model_name, sampler_name
from penstock.server.scheduler.errors import RequestError, not_found
from penstock.server.scheduler.settings import SchedulerSettings
from penstock.server.scheduler.state_store import (
    ModelRecord,
    SamplerRecord,
    SessionRecord,
    StateStore,
)

MAX_METADATA = 64 << 10  # Maximum characters of tags and metadata of a session or model


class Sessions:
    """Known sessions and the times of their last heartbeats."""

    def __init__(self, store: StateStore, settings: SchedulerSettings) -> None:
        self._store = store
        self._max_open, self._max_open_of_owner = settings.max_sessions, settings.max_owner_sessions
        # No heartbeats were received during the restart, so all idle times start at zero.
        self._heard = dict.fromkeys(store.sessions, time.monotonic())

    def create(self, operation: CreateSession, owner: str) -> SessionRecord:
        """Create a session; or return the one of that name, if it belongs to the owner and has not
        ended. Raises RequestError."""
        name = model_name(operation.session) if operation.session is not None else uuid.uuid4().hex
        session = self._store.sessions.get(name)
        if session is not None and session.owner != owner:
            raise RequestError("exists", f"the name {name} is taken; choose another")
        if session is None or session.has_ended:
            check_metadata(operation.tags, operation.user_metadata)
            owners = [record.owner for record in self.open()]
            check_limit("max_sessions", self._max_open, len(owners), "sessions are open")
            own, limit = owners.count(owner), self._max_open_of_owner
            check_limit("max_owner_sessions", limit, own, "sessions of yours are open")
            session = SessionRecord(
                session=name,
                owner=owner,
                created=time.time(),
                tags=operation.tags,
                user_metadata=operation.user_metadata,
            )
            self._store.save_session(session)
        self.touch(name)
        return session

    def find(self, session: str, owner: str) -> SessionRecord:
        """The owner's session. Raises RequestError if there is none, or it has ended."""
        record = self._store.sessions.get(session)
        if record is None or record.owner != owner:
            raise not_found(f"session {session[:200]!r}")
        _check_not_ended(record)
        return record

    def get(self, session: str) -> SessionRecord | None:
        """The session of any owner, whether or not it has ended."""
        return self._store.sessions.get(session)

    def touch(self, session: str) -> None:
        self._heard[session] = time.monotonic()

    def record_heartbeats(self, sessions: tuple[str, ...], owner: str) -> tuple[str, ...]:
        """Record heartbeats of these sessions. Returns those that the owner does not have."""
        gone: list[str] = []
        for session in sessions:
            try:
                self.touch(self.find(session, owner).session)
            except RequestError:
                gone.append(session)
        return tuple(gone)

    def idle_seconds(self, session: str) -> float:
        """Seconds since the last activity of its client."""
        return time.monotonic() - self._heard.get(session, 0.0)

    def list_for_owner(self, owner: str) -> list[SessionRecord]:
        """The owner's sessions that have not ended, oldest first."""
        own = [
            record
            for record in self._store.sessions.values()
            if record.owner == owner and not record.has_ended
        ]
        return sorted(own, key=lambda record: record.created)

    def open(self) -> list[SessionRecord]:
        return [record for record in self._store.sessions.values() if not record.has_ended]

    def models(self, session: str) -> list[ModelRecord]:
        """The models of a session, in creation order."""
        own = [record for record in self._store.models.values() if record.session == session]
        return sorted(own, key=lambda record: record.created)

    def end(self, record: SessionRecord, why: str) -> None:
        """End a session; it accepts no further requests."""
        record.has_ended, record.ending, record.ended = True, why, time.time()
        record.samplers = {}
        self._store.save_session(record)
        self._heard.pop(record.session, None)

    def forget(self, ended_before: float) -> None:
        """Drop sessions that ended before a time, in seconds since the epoch."""
        held = {model.session for model in self._store.models.values() if model.is_open}
        for name, record in list(self._store.sessions.items()):
            if record.has_ended and record.ended < ended_before and name not in held:
                self._store.delete_session(name)

    def new_sampler_name(self, record: SessionRecord, number: int) -> str:
        """The name of a new sampler. Raises RequestError if it exists."""
        name = sampler_name(record.session, number)
        if str(number) in record.samplers:
            raise RequestError("exists", f"sampler {name} exists; choose another number")
        return name

    def add_sampler(self, record: SessionRecord, number: int, sampler: SamplerRecord) -> str:
        """Add a sampler; returns its name. Adding the same one twice is allowed. Raises
        RequestError for a different one of this name, and if the session has ended."""
        name = sampler_name(record.session, number)
        _check_not_ended(record)
        existing = record.samplers.get(str(number))
        if existing is not None and existing != sampler:
            raise RequestError(
                "exists", f"sampler {name} exists, of {existing.path or 'the base model'}"
            )
        if existing is None:
            record.samplers[str(number)] = sampler
            self._store.save_session(record)
        return name

    def touch_sampler(self, name: str) -> None:
        """Record activity of the client of a sampler."""
        self.touch(name.rpartition(SAMPLER)[0])

    def has_sampler(self, name: str) -> bool:
        """Whether a sampler of this name exists, for any owner."""
        session, _, number = name.rpartition(SAMPLER)
        record = self._store.sessions.get(session)
        return record is not None and number in record.samplers

    def sampler(self, name: str, owner: str) -> SamplerRecord:
        """The model of a sampler. Raises RequestError."""
        session, mark, number = name.rpartition(SAMPLER)
        sampler = self.find(session, owner).samplers.get(number) if mark else None
        if sampler is None:
            raise not_found(f"sampler {name[:200]!r}")
        return sampler


def _check_not_ended(record: SessionRecord) -> None:
    if record.has_ended:
        raise RequestError(
            "gone", f"session {record.session} has ended: {record.ending}.\n  Create another."
        )


def check_limit(field: str, most: int, count: int, are_open: str) -> None:
    """Raises RequestError if `most`, the server setting `field`, is reached."""
    if count >= most:
        raise RequestError(
            "busy",
            f"{count} {are_open}, and {field} is {most}.\n"
            "  End one that is not needed, or raise the field in the server's file.",
        )


def check_metadata(tags: tuple[str, ...], metadata: dict[str, str]) -> None:
    """Raises RequestError if tags and metadata are too large."""
    length = sum(map(len, tags)) + sum(len(key) + len(value) for key, value in metadata.items())
    if length > MAX_METADATA:
        raise RequestError(
            "invalid", f"tags and metadata have {length} characters; {MAX_METADATA} may be"
        )
