"""Immediate requests, which need no worker: sessions, listings, checkpoint metadata.

Each is handled on arrival.
"""

from collections.abc import Callable, Collection
from pathlib import Path

from penstock.server.protocol.requests import (
    AddEndpoint,
    CreateSampler,
    CreateSession,
    DeleteCheckpoint,
    EndSession,
    GetCapabilities,
    GetCheckpoint,
    GetModel,
    GetSampler,
    GetSession,
    Heartbeat,
    ImmediateOperation,
    ListCheckpoints,
    ListEndpoints,
    ListModels,
    ListSessions,
    RemoveEndpoint,
    UpdateCheckpoint,
)
from penstock.server.protocol.results import (
    CheckpointResult,
    CreateSessionResult,
    Done,
    HeartbeatResult,
    ListCheckpointsResult,
    ListModelsResult,
    ListSessionsResult,
    ModelResult,
    Result,
    SamplerResult,
    ServedModel,
    SessionResult,
)
from penstock.server.scheduler.checkpoint_catalog import CheckpointCatalog, to_checkpoint_info
from penstock.server.scheduler.checkpoint_names import sampler_name
from penstock.server.scheduler.errors import RequestError
from penstock.server.scheduler.inference_endpoints import InferenceEndpoints
from penstock.server.scheduler.models import Models
from penstock.server.scheduler.queue import Outcome
from penstock.server.scheduler.sessions import Sessions
from penstock.server.scheduler.state_store import SamplerRecord, SessionRecord, StateStore
from penstock.server.scheduler.validate_request import check_base, check_ttl

MAX_PAGE = 1000
"""Maximum models per page."""


class ImmediateRequests:
    """Handles immediate requests."""

    def __init__(
        self,
        store: StateStore,
        sessions: Sessions,
        models: Models,
        checkpoints: CheckpointCatalog,
        *,
        served: Callable[[], ServedModel],
        base_names: Callable[[], list[str]],
        pending: Callable[[str], int],
        discard: Callable[[list[Path]], None],
        end: Callable[[SessionRecord, str], None],
        allowed_hosts: Collection[str],
    ) -> None:
        """`served` raises RequestError while the workers are unknown; `pending` counts the requests
        of a model; `discard` deletes folders in the background; `end` ends a session for a reason;
        `allowed_hosts`: allowed inference servers."""
        self._store = store
        self._sessions = sessions
        self._models = models
        self._checkpoints = checkpoints
        self._served = served
        self._base_names = base_names
        self._pending = pending
        self._discard = discard
        self._end = end
        self._endpoints_file = InferenceEndpoints(store, allowed_hosts)

    def run(self, operation: ImmediateOperation, owner: str) -> Result:
        """Handle a request. Raises RequestError."""
        match operation:
            case CreateSession() | Heartbeat() | EndSession() | ListSessions() | GetSession():
                return self._session(operation, owner)
            case CreateSampler() | GetSampler():
                return self._sampler(operation, owner)
            case GetCapabilities():
                return self._served()
            case GetModel() | ListModels():
                return self._model(operation, owner)
            case ListCheckpoints() | DeleteCheckpoint() | UpdateCheckpoint() | GetCheckpoint():
                return self._checkpoint(operation, owner)
            case RemoveEndpoint() | ListEndpoints():
                return self._endpoints_file.run(operation, owner)

    def add(self, operation: AddEndpoint, owner: str, end: Callable[[Outcome], None]) -> None:
        """Add an endpoint: the only immediate request that waits for another server; `end` receives
        its outcome."""
        self._endpoints_file.add(operation, owner, end)

    def _notice(self) -> str:
        try:
            return self._served().notice
        except RequestError:
            return ""

    def _session(
        self,
        operation: CreateSession | Heartbeat | EndSession | ListSessions | GetSession,
        owner: str,
    ) -> Result:
        match operation:
            case CreateSession():
                session = self._sessions.create(operation, owner)
                return CreateSessionResult(session=session.session, notice=self._notice())
            case Heartbeat():
                return HeartbeatResult(
                    sessions=self._sessions.record_heartbeats(operation.sessions, owner)
                )
            case EndSession():
                record = self._sessions.find(operation.session, owner)
                self._end(record, "its client has ended it")
                return Done()
            case ListSessions():
                own = self._sessions.list_for_owner(owner)
                return ListSessionsResult(sessions=tuple(record.session for record in own))
            case GetSession():
                record = self._sessions.find(operation.session, owner)
                samplers = sorted(record.samplers, key=int)
                return SessionResult(
                    session=record.session,
                    models=tuple(
                        model.model
                        for model in self._sessions.models(record.session)
                        if model.owner == owner
                    ),
                    samplers=tuple(
                        sampler_name(record.session, int(number)) for number in samplers
                    ),
                    user_metadata=record.user_metadata,
                )

    def _sampler(self, operation: CreateSampler | GetSampler, owner: str) -> Result:
        if isinstance(operation, GetSampler):
            record = self._sessions.sampler(operation.sampler, owner)
            return SamplerResult(
                sampler=operation.sampler, base_model=record.base_model, path=record.path
            )
        session = self._sessions.find(operation.session, owner)
        self._sessions.touch(operation.session)
        names = self._base_names()
        check_base(operation.base_model, names)
        base_model, path = names[0], operation.path
        if path is not None:
            ref, checkpoint = self._checkpoints.read(path, owner)
            if ref.subfolder != "sampler_weights":
                raise RequestError(
                    "invalid",
                    f"{ref} is for resuming training.\n  Save weights for sampling, and sample"
                    " from <model>/sampler_weights/<name>.",
                )
            if checkpoint.base_model != base_model:
                raise RequestError(
                    "invalid", f"{ref} is of {checkpoint.base_model}, and here is {base_model}"
                )
            path = str(ref)
        sampler = SamplerRecord(base_model=base_model, path=path)
        name = self._sessions.add_sampler(session, operation.number, sampler)
        return SamplerResult(sampler=name, base_model=base_model, path=path)

    def _model(self, operation: GetModel | ListModels, owner: str) -> Result:
        if isinstance(operation, GetModel):
            record = self._models.find(operation.model, owner)
            return ModelResult(
                info=self._checkpoints.model_info(record),
                served=self._served(),
                pending=self._pending(record.model),
            )
        if operation.limit < 1 or operation.offset < 0:
            raise RequestError(
                "invalid",
                f"limit is {operation.limit}, offset {operation.offset}; at least 1 and 0",
            )
        own = self._models.list_for_owner(owner)
        page = own[operation.offset : operation.offset + min(operation.limit, MAX_PAGE)]
        return ListModelsResult(
            models=tuple(self._checkpoints.model_info(model) for model in page), total=len(own)
        )

    def _checkpoint(
        self,
        operation: ListCheckpoints | DeleteCheckpoint | UpdateCheckpoint | GetCheckpoint,
        owner: str,
    ) -> Result:
        match operation:
            case ListCheckpoints():
                if operation.model is not None:
                    records = [self._models.find(operation.model, owner)]
                else:
                    records = self._models.list_for_owner(owner)
                checkpoints = [
                    checkpoint
                    for record in records
                    for checkpoint in self._checkpoints.list_for_model(record)
                ]
                checkpoints.sort(key=lambda checkpoint: checkpoint.time)
                return ListCheckpointsResult(checkpoints=tuple(checkpoints))
            case DeleteCheckpoint():
                record = self._models.find(operation.model, owner)
                self._discard([self._checkpoints.delete(record, operation.name)])
                return Done()
            case UpdateCheckpoint():
                record = self._models.find(operation.model, owner)
                check_ttl(operation.ttl_seconds)
                self._checkpoints.keep(
                    record, operation.name, operation.ttl_seconds, operation.public
                )
                return Done()
            case GetCheckpoint():
                ref, checkpoint = self._checkpoints.read(operation.path, owner)
                return CheckpointResult(
                    base_model=checkpoint.base_model,
                    lora=checkpoint.lora,
                    checkpoint=to_checkpoint_info(ref.model, ref.relative_name, checkpoint),
                )
