"""Immediate requests, which need no worker: sessions, listings, checkpoint metadata.

Each is handled on arrival.
"""

from collections.abc import Callable, Collection
from pathlib import Path

from penstock.server.protocol.requests import (
    AddEndpoint,
    Capabilities,
    CreateSampler,
    CreateSession,
    DeleteCheckpoint,
    EndSession,
    Heartbeat,
    Immediate,
    KeepCheckpoint,
    ListCheckpoints,
    ListEndpoints,
    ListRuns,
    ListSessions,
    ModelOf,
    RemoveEndpoint,
    SamplerOf,
    SessionOf,
    WeightsOf,
)
from penstock.server.protocol.results import (
    CheckpointsResult,
    Done,
    Gone,
    ModelResult,
    Result,
    Runs,
    SamplerResult,
    Served,
    SessionMade,
    SessionResult,
    WeightsResult,
)
from penstock.server.protocol.results import Sessions as SessionsTold
from penstock.server.scheduler.checkpoint_catalog import Checkpoints, told
from penstock.server.scheduler.checkpoint_names import sampler_name
from penstock.server.scheduler.errors import RequestError
from penstock.server.scheduler.inference_endpoints import Destinations
from penstock.server.scheduler.models import Models
from penstock.server.scheduler.queue import Outcome
from penstock.server.scheduler.sessions import Sessions
from penstock.server.scheduler.state_store import Registry, SamplerRecord, SessionRecord
from penstock.server.scheduler.validate_request import check_base, check_ttl

MAX_PAGE = 1000
"""Maximum models per page."""


class ImmediateRequests:
    """Handles immediate requests."""

    def __init__(
        self,
        registry: Registry,
        sessions: Sessions,
        models: Models,
        checkpoints: Checkpoints,
        *,
        served: Callable[[], Served],
        base_names: Callable[[], list[str]],
        pending: Callable[[str], int],
        discard: Callable[[list[Path]], None],
        end: Callable[[SessionRecord, str], None],
        allowed_hosts: Collection[str],
    ) -> None:
        """`served` raises RequestError while the workers are unknown; `pending` counts the requests
        of a model; `discard` deletes folders in the background; `end` ends a session for a reason;
        `allowed_hosts`: allowed inference servers."""
        self._registry = registry
        self._sessions = sessions
        self._models = models
        self._checkpoints = checkpoints
        self._served = served
        self._base_names = base_names
        self._pending = pending
        self._discard = discard
        self._end = end
        self._destinations = Destinations(registry, allowed_hosts)

    def do(self, work: Immediate, owner: str) -> Result:
        """Handle a request. Raises RequestError."""
        match work:
            case CreateSession() | Heartbeat() | EndSession() | ListSessions() | SessionOf():
                return self._session(work, owner)
            case CreateSampler() | SamplerOf():
                return self._sampler(work, owner)
            case Capabilities():
                return self._served()
            case ModelOf() | ListRuns():
                return self._model(work, owner)
            case ListCheckpoints() | DeleteCheckpoint() | KeepCheckpoint() | WeightsOf():
                return self._checkpoint(work, owner)
            case RemoveEndpoint() | ListEndpoints():
                return self._destinations.do(work, owner)

    def add(self, work: AddEndpoint, owner: str, end: Callable[[Outcome], None]) -> None:
        """Add an endpoint: the only immediate request that waits for another server; `end` receives
        its outcome."""
        self._destinations.add(work, owner, end)

    def _notice(self) -> str:
        try:
            return self._served().notice
        except RequestError:
            return ""

    def _session(
        self,
        work: CreateSession | Heartbeat | EndSession | ListSessions | SessionOf,
        owner: str,
    ) -> Result:
        match work:
            case CreateSession():
                made = self._sessions.create(work, owner)
                return SessionMade(session=made.session, notice=self._notice())
            case Heartbeat():
                return Gone(sessions=self._sessions.beat(work.sessions, owner))
            case EndSession():
                record = self._sessions.find(work.session, owner)
                self._end(record, "its client has ended it")
                return Done()
            case ListSessions():
                own = self._sessions.of_owner(owner)
                return SessionsTold(sessions=tuple(record.session for record in own))
            case SessionOf():
                record = self._sessions.find(work.session, owner)
                samplers = sorted(record.samplers, key=int)
                return SessionResult(
                    session=record.session,
                    models=tuple(
                        each.model
                        for each in self._sessions.models(record.session)
                        if each.owner == owner
                    ),
                    samplers=tuple(
                        sampler_name(record.session, int(number)) for number in samplers
                    ),
                    user_metadata=record.user_metadata,
                )

    def _sampler(self, work: CreateSampler | SamplerOf, owner: str) -> Result:
        if isinstance(work, SamplerOf):
            found = self._sessions.sampler(work.sampler, owner)
            return SamplerResult(sampler=work.sampler, base_model=found.base_model, path=found.path)
        session = self._sessions.find(work.session, owner)
        self._sessions.touch(work.session)
        names = self._base_names()
        check_base(work.base_model, names)
        base_model, path = names[0], work.path
        if path is not None:
            spot, kept = self._checkpoints.read(path, owner)
            if spot.room != "sampler_weights":
                raise RequestError(
                    "invalid",
                    f"{spot} is what training goes on from.\n  Save it for sampling, and sample"
                    " from <model>/sampler_weights/<name>.",
                )
            if kept.base_model != base_model:
                raise RequestError(
                    "invalid", f"{spot} is of {kept.base_model}, and here is {base_model}"
                )
            path = str(spot)
        sampler = SamplerRecord(base_model=base_model, path=path)
        name = self._sessions.add_sampler(session, work.number, sampler)
        return SamplerResult(sampler=name, base_model=base_model, path=path)

    def _model(self, work: ModelOf | ListRuns, owner: str) -> Result:
        if isinstance(work, ModelOf):
            record = self._models.find(work.model, owner)
            return ModelResult(
                run=self._checkpoints.run(record),
                served=self._served(),
                pending=self._pending(record.model),
            )
        if work.limit < 1 or work.offset < 0:
            raise RequestError(
                "invalid",
                f"limit is {work.limit} and offset {work.offset}; they are 1 and 0 at least",
            )
        own = self._models.of_owner(owner)
        page = own[work.offset : work.offset + min(work.limit, MAX_PAGE)]
        return Runs(runs=tuple(self._checkpoints.run(each) for each in page), total=len(own))

    def _checkpoint(
        self,
        work: ListCheckpoints | DeleteCheckpoint | KeepCheckpoint | WeightsOf,
        owner: str,
    ) -> Result:
        match work:
            case ListCheckpoints():
                if work.model is not None:
                    records = [self._models.find(work.model, owner)]
                else:
                    records = self._models.of_owner(owner)
                found = [each for record in records for each in self._checkpoints.of_model(record)]
                found.sort(key=lambda checkpoint: checkpoint.time)
                return CheckpointsResult(checkpoints=tuple(found))
            case DeleteCheckpoint():
                record = self._models.find(work.model, owner)
                self._discard([self._checkpoints.delete(record, work.name)])
                return Done()
            case KeepCheckpoint():
                record = self._models.find(work.model, owner)
                check_ttl(work.ttl_seconds)
                self._checkpoints.keep(record, work.name, work.ttl_seconds, work.public)
                return Done()
            case WeightsOf():
                spot, kept = self._checkpoints.read(work.path, owner)
                return WeightsResult(
                    base_model=kept.base_model,
                    lora=kept.lora,
                    checkpoint=told(spot.model, spot.within, kept),
                )
