"""Sessions of clients and what belongs to them: who owns it, and whether its client lives.

Nothing is done here that workers are needed for.
"""

import time
import uuid

from penstock.server.protocol.requests import CreateSession
from penstock.server.scheduler.checkpoint_names import SAMPLER, model_name, sampler_name
from penstock.server.scheduler.errors import RequestError, not_found
from penstock.server.scheduler.settings import EngineSettings
from penstock.server.scheduler.state_store import (
    ModelRecord,
    Registry,
    SamplerRecord,
    SessionRecord,
)

MAX_METADATA = 64 << 10
"""Characters of tags and metadata that a session or a model may bear."""


class Sessions:
    """Those that are known, and when they were heard of."""

    def __init__(self, registry: Registry, settings: EngineSettings) -> None:
        self._registry = registry
        self._most, self._most_of_owner = settings.max_sessions, settings.max_owner_sessions
        # Nobody was heard while nobody listened: all have their time anew.
        self._heard = dict.fromkeys(registry.sessions, time.monotonic())

    def create(self, work: CreateSession, owner: str) -> SessionRecord:
        """A new one; or the one of that name, if it is the owner's and has not ended.

        Raises RefusedError.
        """
        name = model_name(work.session) if work.session is not None else uuid.uuid4().hex
        known = self._registry.sessions.get(name)
        if known is not None and known.owner != owner:
            raise RequestError("exists", f"the name {name} is taken; choose another")
        if known is None or known.has_ended:
            check_metadata(work.tags, work.user_metadata)
            owners = [record.owner for record in self.open()]
            check_number("max_sessions", self._most, len(owners), "sessions are open")
            check_number(
                "max_owner_sessions",
                self._most_of_owner,
                owners.count(owner),
                "sessions of yours are open",
            )
            known = SessionRecord(
                session=name,
                owner=owner,
                created=time.time(),
                tags=work.tags,
                user_metadata=work.user_metadata,
            )
            self._registry.keep_session(known)
        self.touch(name)
        return known

    def find(self, session: str, owner: str) -> SessionRecord:
        """Raises RefusedError where it is not there, not the owner's, or has ended."""
        record = self._registry.sessions.get(session)
        if record is None or record.owner != owner:
            raise not_found(f"session {session[:200]!r}")
        _check_goes_on(record)
        return record

    def known(self, session: str) -> SessionRecord | None:
        """Whoever's it is, and whether it has ended or not."""
        return self._registry.sessions.get(session)

    def touch(self, session: str) -> None:
        """Its client was heard of."""
        self._heard[session] = time.monotonic()

    def beat(self, sessions: tuple[str, ...], owner: str) -> tuple[str, ...]:
        """Clients of these sessions were heard of. Returns those that the owner does not have."""
        gone: list[str] = []
        for session in sessions:
            try:
                self.touch(self.find(session, owner).session)
            except RequestError:
                gone.append(session)
        return tuple(gone)

    def idle_for(self, session: str) -> float:
        """Seconds since its client was heard of."""
        return time.monotonic() - self._heard.get(session, 0.0)

    def of_owner(self, owner: str) -> list[SessionRecord]:
        """Those that have not ended, in the order of their beginning."""
        own = [
            record
            for record in self._registry.sessions.values()
            if record.owner == owner and not record.has_ended
        ]
        return sorted(own, key=lambda record: record.created)

    def open(self) -> list[SessionRecord]:
        """All that have not ended, whoever's they are."""
        return [record for record in self._registry.sessions.values() if not record.has_ended]

    def models(self, session: str) -> list[ModelRecord]:
        """Those that belong to it, in the order in which they were made."""
        own = [record for record in self._registry.models.values() if record.session == session]
        return sorted(own, key=lambda record: record.created)

    def end(self, record: SessionRecord, why: str) -> None:
        """Nothing is asked for by it any more."""
        record.has_ended, record.ending, record.ended = True, why, time.time()
        record.samplers = {}
        self._registry.keep_session(record)
        self._heard.pop(record.session, None)

    def forget(self, ended_before: float) -> None:
        """Know nothing more of those that ended before a time, in seconds since the epoch."""
        held = {model.session for model in self._registry.models.values() if model.is_open}
        for name, record in list(self._registry.sessions.items()):
            if record.has_ended and record.ended < ended_before and name not in held:
                self._registry.drop_session(name)

    def free_sampler(self, record: SessionRecord, number: int) -> str:
        """The name of a sampler that is not there yet. Raises RefusedError where it is."""
        name = sampler_name(record.session, number)
        if str(number) in record.samplers:
            raise RequestError("exists", f"sampler {name} is there; choose another number")
        return name

    def add_sampler(self, record: SessionRecord, number: int, sampler: SamplerRecord) -> str:
        """Its name. The same one may be made twice. Raises RefusedError where it is another, and
        where the session has ended meanwhile."""
        name = sampler_name(record.session, number)
        _check_goes_on(record)
        known = record.samplers.get(str(number))
        if known is not None and known != sampler:
            raise RequestError("exists", f"sampler {name} is there, of {known.path or 'the base'}")
        if known is None:
            record.samplers[str(number)] = sampler
            self._registry.keep_session(record)
        return name

    def touch_sampler(self, name: str) -> None:
        """The client of a sampler was heard of."""
        self.touch(name.rpartition(SAMPLER)[0])

    def has_sampler(self, name: str) -> bool:
        """Whether a sampler of this name is there, whoever's it is."""
        session, _, number = name.rpartition(SAMPLER)
        record = self._registry.sessions.get(session)
        return record is not None and number in record.samplers

    def sampler(self, name: str, owner: str) -> SamplerRecord:
        """What is sampled from under a name. Raises RefusedError."""
        session, mark, number = name.rpartition(SAMPLER)
        found = self.find(session, owner).samplers.get(number) if mark else None
        if found is None:
            raise not_found(f"sampler {name[:200]!r}")
        return found


def _check_goes_on(record: SessionRecord) -> None:
    if record.has_ended:
        raise RequestError(
            "gone", f"session {record.session} has ended: {record.ending}.\n  Begin another."
        )


def check_number(field: str, most: int, there: int, are_open: str) -> None:
    """Raises RefusedError where `most`, which the server's file calls `field`, are there."""
    if there >= most:
        raise RequestError(
            "busy",
            f"{there} {are_open}, and {field} is {most}.\n"
            "  End one that is not needed, or raise the field in the server's file.",
        )


def check_metadata(tags: tuple[str, ...], metadata: dict[str, str]) -> None:
    """Raises RefusedError for more of it than is kept."""
    length = sum(map(len, tags)) + sum(len(key) + len(value) for key, value in metadata.items())
    if length > MAX_METADATA:
        raise RequestError(
            "invalid", f"tags and metadata have {length} characters; {MAX_METADATA} may be"
        )
