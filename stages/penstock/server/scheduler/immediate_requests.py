"""Requests that need no worker: sessions, listings, checkpoint metadata. Handled on arrival."""

from dataclasses import dataclass

from penstock.server.protocol import requests, results
from penstock.server.scheduler.checkpoint_catalog import CheckpointCatalog, to_checkpoint_info
from penstock.server.scheduler.checkpoint_names import sampler_name
from penstock.server.scheduler.errors import RequestError
from penstock.server.scheduler.expiry import Expiry
from penstock.server.scheduler.inference_endpoints import InferenceEndpoints
from penstock.server.scheduler.models import Models
from penstock.server.scheduler.queue import RequestQueue
from penstock.server.scheduler.sessions import Sessions
from penstock.server.scheduler.state_store import SamplerRecord
from penstock.server.scheduler.storage import TrashCollector
from penstock.server.scheduler.validate_request import check_base, check_ttl
from penstock.server.scheduler.worker_client import WorkerClient

MAX_PAGE = 1000


@dataclass
class ImmediateRequests:
    """Handles immediate requests."""

    endpoints: InferenceEndpoints
    sessions: Sessions
    models: Models
    checkpoints: CheckpointCatalog
    workers: WorkerClient
    queue: RequestQueue
    expiry: Expiry
    trash: TrashCollector

    def run(self, operation: requests.ImmediateOperation, owner: str) -> results.Result:
        """Handle a request. Raises RequestError."""
        match operation:
            case requests.CreateSession():
                session = self.sessions.create(operation, owner)
                notice = self.workers.last.served.notice if self.workers.last else ""
                return results.CreateSessionResult(session=session.session, notice=notice)
            case requests.Heartbeat():
                gone = self.sessions.record_heartbeats(operation.sessions, owner)
                return results.HeartbeatResult(sessions=gone)
            case requests.EndSession():
                session = self.sessions.find(operation.session, owner)
                self.expiry.end(session, "its client has ended it")
                return results.Done()
            case requests.ListSessions():
                own = self.sessions.list_for_owner(owner)
                return results.ListSessionsResult(sessions=tuple(record.session for record in own))
            case requests.GetSession():
                return self._session(operation, owner)
            case requests.CreateSampler():
                return self._create_sampler(operation, owner)
            case requests.GetSampler():
                name, sampler = operation.sampler, self.sessions.sampler(operation.sampler, owner)
                return results.SamplerResult(
                    sampler=name, base_model=sampler.base_model, path=sampler.path
                )
            case requests.GetCapabilities():
                return self.workers.served
            case requests.RemoveEndpoint() | requests.ListEndpoints():
                return self.endpoints.run(operation, owner)
            case _:
                return self._run_on_models(operation, owner)

    def _run_on_models(
        self,
        operation: requests.GetModel
        | requests.ListModels
        | requests.ListCheckpoints
        | requests.DeleteCheckpoint
        | requests.UpdateCheckpoint
        | requests.GetCheckpoint,
        owner: str,
    ) -> results.Result:
        match operation:
            case requests.GetModel():
                record = self.models.find(operation.model, owner)
                return results.ModelResult(
                    info=self.checkpoints.model_info(record),
                    served=self.workers.served,
                    pending=self.queue.pending(record.model),
                )
            case requests.ListModels():
                return self._list_models(operation, owner)
            case requests.ListCheckpoints():
                return self._list_checkpoints(operation, owner)
            case requests.DeleteCheckpoint():
                record = self.models.find(operation.model, owner)
                self.trash.discard([self.checkpoints.delete(record, operation.name)])
                return results.Done()
            case requests.UpdateCheckpoint():
                record = self.models.find(operation.model, owner)
                check_ttl(operation.ttl_seconds)
                self.checkpoints.keep(
                    record, operation.name, operation.ttl_seconds, operation.public
                )
                return results.Done()
            case requests.GetCheckpoint():
                ref, checkpoint = self.checkpoints.read(operation.path, owner)
                return results.CheckpointResult(
                    base_model=checkpoint.base_model,
                    lora=checkpoint.lora,
                    checkpoint=to_checkpoint_info(ref.model, ref.relative_name, checkpoint),
                )

    def _session(self, operation: requests.GetSession, owner: str) -> results.Result:
        record = self.sessions.find(operation.session, owner)
        models = self.sessions.models(record.session)
        return results.SessionResult(
            session=record.session,
            models=tuple(model.model for model in models if model.owner == owner),
            samplers=tuple(
                sampler_name(record.session, number) for number in sorted(map(int, record.samplers))
            ),
            user_metadata=record.user_metadata,
        )

    def _create_sampler(self, operation: requests.CreateSampler, owner: str) -> results.Result:
        session = self.sessions.find(operation.session, owner)
        self.sessions.touch(operation.session)
        names = self.workers.base_names
        check_base(operation.base_model, names)
        base_model, path = names[0], operation.path
        if path is not None:
            ref, checkpoint = self.checkpoints.read(path, owner)
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
        name = self.sessions.add_sampler(session, operation.number, sampler)
        return results.SamplerResult(sampler=name, base_model=base_model, path=path)

    def _list_models(self, operation: requests.ListModels, owner: str) -> results.Result:
        if operation.limit < 1 or operation.offset < 0:
            raise RequestError(
                "invalid",
                f"limit is {operation.limit}, offset {operation.offset}; at least 1 and 0",
            )
        own = self.models.list_for_owner(owner)
        page = own[operation.offset : operation.offset + min(operation.limit, MAX_PAGE)]
        return results.ListModelsResult(
            models=tuple(self.checkpoints.model_info(model) for model in page), total=len(own)
        )

    def _list_checkpoints(self, operation: requests.ListCheckpoints, owner: str) -> results.Result:
        if operation.model is not None:
            records = [self.models.find(operation.model, owner)]
        else:
            records = self.models.list_for_owner(owner)
        checkpoints = [
            checkpoint
            for record in records
            for checkpoint in self.checkpoints.list_for_model(record)
        ]
        checkpoints.sort(key=lambda checkpoint: checkpoint.time)
        return results.ListCheckpointsResult(checkpoints=tuple(checkpoints))
