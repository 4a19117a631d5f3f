"""Training requests as worker commands. Called one at a time."""

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from msgspec import structs

from penstock.server.protocol import requests, results
from penstock.server.protocol import worker_commands as commands
from penstock.server.protocol.results import Done
from penstock.server.protocol.types import LoraConfig, common_fields
from penstock.server.scheduler.checkpoint_catalog import CheckpointCatalog
from penstock.server.scheduler.checkpoint_names import INITIAL, CheckpointRef, parse_checkpoint_path
from penstock.server.scheduler.errors import RequestError, WorkersLostError
from penstock.server.scheduler.inference_endpoints import (
    list_endpoints,
    resume_inference_servers,
    target_endpoints,
)
from penstock.server.scheduler.models import Models
from penstock.server.scheduler.pack_rows import pack
from penstock.server.scheduler.save_checkpoint import CheckpointSaver
from penstock.server.scheduler.sessions import Sessions
from penstock.server.scheduler.settings import SchedulerSettings
from penstock.server.scheduler.state_store import (
    CheckpointRecord,
    ModelRecord,
    ResumePoint,
    SamplerRecord,
    StateStore,
    build_create_command,
)
from penstock.server.scheduler.worker_client import WorkerClient

SYNCED = "weights_synced"
"""The step metric that says whether the weights were synced to inference servers."""

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingRequests:
    """Runs training requests."""

    settings: SchedulerSettings
    workers: WorkerClient
    store: StateStore
    sessions: Sessions
    models: Models
    checkpoints: CheckpointCatalog
    saver: CheckpointSaver
    allowed_hosts: Collection[str]  # Allowed inference servers

    async def run(
        self, operation: requests.TrainingOperation, owner: str, why: str
    ) -> results.Result:
        """Run a request. `why`: the reason for unloading a model. Raises RequestError."""
        record = self.models.find_open(operation.model, owner)
        record.last_request = time.time()
        match operation:
            case requests.ForwardBackward():
                return await self._pass(record, operation)
            case requests.OptimStep():
                return await self._step(record, operation)
            case requests.ZeroGrad():
                with self.models.modifying(record):
                    await self.workers.run(operation, Done)
                live = self.models.get_state(record)
                live.has_gradients = live.lost_gradients = False
                return Done()
            case requests.SaveState():
                self.models.check_not_corrupted(record)
                ref = await self.saver.training(
                    record,
                    operation.name,
                    overwrite=operation.overwrite,
                    ttl_seconds=operation.ttl_seconds,
                    user_metadata=operation.user_metadata,
                )
                return results.SaveResult(model=record.model, name=ref.relative_name)
            case requests.LoadState():
                return await self._load_state(record, operation, owner)
            case requests.SaveSamplerWeights():
                return await self._save_sampler(record, operation, owner)
            case requests.SyncWeights():
                return await self._sync(record, operation)
            case requests.UnloadModel():
                if operation.save and self._is_unsaved(record):
                    await self.save(record)
                await self.workers.run(commands.UnloadModelCommand(model=record.model), Done)
                self.models.mark_unloaded(record, why)
                return Done()

    def is_repeatable(self, operation: requests.ModelOperation) -> bool:
        """Whether a request that was lost with the workers can be retried once they are restored:
        it changed no unsaved state, or does not depend on the model's previous state."""
        if isinstance(operation, requests.CreateModel):
            return True
        record = self.models.get(operation.model)
        if record is None or not record.is_open:
            return False
        return isinstance(operation, requests.LoadState) or not (
            record.is_unsaved or record.corrupted
        )

    def unsaved(self) -> list[ModelRecord]:
        """Loaded models with unsaved changes, most recently requested first."""
        return [record for record in self.models.open() if self._is_unsaved(record)]

    async def save(self, record: ModelRecord) -> CheckpointRef:
        """Save it under a timestamp name. Raises RequestError."""
        return await self.saver.training(record, None)

    async def create(self, operation: requests.CreateModel, owner: str) -> results.Result:
        start = None if operation.path is None else self.checkpoints.read(operation.path, owner)
        ready = self.workers.ready
        if ready is None:
            raise WorkersLostError("the workers are not connected")
        now = time.time()
        own = {
            "base_model": ready.served.base_model,
            "lora": self._lora(operation.lora, start, ready.served),
        }
        record = ModelRecord(
            owner=owner,
            created=now,
            last_request=now,
            **common_fields(operation, ModelRecord) | own,
        )
        if start is not None:
            self._check_fits(record, *start)
        sizes = await self.workers.run(build_create_command(record), commands.CheckpointSizes)
        previous = self.store.models.get(record.model)
        if previous is not None:
            # Of an unloaded model of this name: its checkpoints stay, with their names.
            record.checkpoints = previous.checkpoints
        try:
            if start is not None:
                record.start = await self._load(record, *start, optimizer=operation.optimizer)
                record.step = start[1].step if operation.optimizer else 0
            self.models.mark_loaded(record, ready.instance, sizes)
            if not self.settings.skip_initial_checkpoint:
                await self.saver.training(record, INITIAL, overwrite=True)
        except (RequestError, OSError) as error:
            await self._undo_create(record, previous, error)
            raise
        return results.CreateModelResult(model=record.model)

    async def _undo_create(
        self, record: ModelRecord, previous: ModelRecord | None, error: Exception
    ) -> None:
        if self.store.models.get(record.model) is record:
            if previous is None and not record.checkpoints:
                self.store.delete_model(record.model)
            else:
                self.models.mark_unloaded(record, "it could not be created")
        if not isinstance(error, WorkersLostError):
            try:
                await self.workers.run(commands.UnloadModelCommand(model=record.model), Done)
            except RequestError as unload_error:
                LOG.warning("model %s is not unloaded: %s", record.model, unload_error)

    def _lora(
        self,
        requested: LoraConfig | None,
        start: tuple[CheckpointRef, CheckpointRecord] | None,
        served: results.ServedModel,
    ) -> LoraConfig | None:
        """The LoRA config of a new model, as requested, or that of its checkpoint."""
        if served.trains == "all weights":
            return None
        checkpoint = start[1].lora if start else None
        lora = requested or checkpoint or LoraConfig(rank=served.max_rank)
        if checkpoint is None or checkpoint.alpha is None:
            return lora
        if lora.alpha not in (None, checkpoint.alpha):
            raise RequestError(
                "invalid",
                f"the checkpoint's alpha is {checkpoint.alpha}, and {lora.alpha} is requested",
            )
        return structs.replace(lora, alpha=checkpoint.alpha)

    def _check_fits(
        self, record: ModelRecord, ref: CheckpointRef, checkpoint: CheckpointRecord
    ) -> None:
        """Raises RequestError if a model cannot load a checkpoint."""
        if ref.subfolder != "weights":
            raise RequestError(
                "invalid", f"{ref} is for sampling; training resumes from <model>/weights/<name>"
            )
        if checkpoint.base_model != record.base_model:
            raise RequestError(
                "invalid", f"{ref} is of {checkpoint.base_model}, and here is {record.base_model}"
            )
        own, stored = record.lora, checkpoint.lora
        if (own and own.rank) != (stored and stored.rank):
            raise RequestError(
                "invalid",
                f"{ref} is {_rank(stored)}, and model {record.model} {_rank(own)}.\n"
                "  Create a model of that kind from it.",
            )

    async def _pass(
        self, record: ModelRecord, operation: requests.ForwardBackward
    ) -> results.Result:
        self.models.check_not_corrupted(record)
        lengths = [datum.tokens.shape[0] for datum in operation.data]
        ready = self.workers.ready
        rows = pack(lengths, self.settings, ready.replicas if ready else 1)
        fields = common_fields(operation, commands.ForwardBackwardCommand)
        order = commands.ForwardBackwardCommand(rows=rows, **fields)
        if operation.forward_only:
            return await self._run_pass(order)
        live = self.models.get_state(record)
        with self.models.modifying(record):
            passed = await self._run_pass(order)
            live.has_gradients, live.lost_gradients = True, False
        return passed

    async def _run_pass(
        self, order: commands.ForwardBackwardCommand
    ) -> results.ForwardBackwardResult:
        passed = await self.workers.run(order, results.ForwardBackwardResult)
        if len(passed.outputs) != len(order.data):
            raise RequestError("internal", "the workers returned outputs of other samples")
        return passed

    async def _step(self, record: ModelRecord, operation: requests.OptimStep) -> results.Result:
        self.models.check_not_corrupted(record)
        self.models.check_gradients(record)
        live = self.models.get_state(record)
        try:
            with self.models.modifying(record):
                stepped = await self.workers.run(
                    # The sync is a command of its own: its failure must not fail the step.
                    structs.replace(operation, sync=None),
                    results.OptimStepResult,
                )
        except RequestError as error:
            if error.code == "not_finite":
                # The workers have dropped those gradients.
                live.has_gradients = False
            raise
        live.has_gradients = False
        live.step = int(stepped.metrics.get("step", live.step + 1))
        if operation.sync is not None:
            synced = await self._sync_after_step(record, operation.sync)
            stepped = structs.replace(stepped, metrics=stepped.metrics | synced)
        return stepped

    async def _sync_after_step(
        self, record: ModelRecord, operation: requests.SyncWeights
    ) -> dict[str, float]:
        """Whether the weights were synced. The step was taken either way, so a failed sync must not
        look like a failed step."""
        if not list_endpoints(self.store, record.owner, operation.pools):
            return {}
        try:
            await self._sync(record, operation)
        except WorkersLostError:
            raise
        except RequestError as error:
            LOG.warning("model %s after a step: %s", record.model, error)
            return {SYNCED: 0.0}
        return {SYNCED: 1.0}

    async def _load(
        self,
        record: ModelRecord,
        ref: CheckpointRef,
        checkpoint: CheckpointRecord,
        *,
        optimizer: bool,
    ) -> ResumePoint:
        folder = str(self.checkpoints.folder(ref))
        await self.workers.run(
            commands.LoadCheckpointCommand(model=record.model, folder=folder, optimizer=optimizer),
            Done,
        )
        return ResumePoint(path=str(ref), optimizer=optimizer, time=checkpoint.time)

    async def _load_state(
        self, record: ModelRecord, operation: requests.LoadState, owner: str
    ) -> results.Result:
        ref, checkpoint = self.checkpoints.read(operation.path, owner)
        self._check_fits(record, ref, checkpoint)
        with self.models.modifying(record):
            start = await self._load(record, ref, checkpoint, optimizer=operation.optimizer)
        live = self.models.get_state(record)
        live.has_gradients = live.lost_gradients = False
        live.step = checkpoint.step if operation.optimizer else 0
        record.corrupted = False
        self.models.set_resume_point(record, start, step=live.step)
        return results.CreateModelResult(model=record.model)

    async def _save_sampler(
        self, record: ModelRecord, operation: requests.SaveSamplerWeights, owner: str
    ) -> results.Result:
        self.models.check_not_corrupted(record)
        session = (
            None if operation.session is None else self.sessions.find(operation.session, owner)
        )
        save = partial(
            self.saver.sampler,
            record,
            operation.name,
            ttl_seconds=operation.ttl_seconds,
            user_metadata=operation.user_metadata,
        )
        if session is None or operation.number is None:
            return results.SaveResult(model=record.model, name=(await save()).relative_name)
        name = self.sessions.new_sampler_name(session, operation.number)
        ref = await save(only_for=None if operation.keep else name)
        sampler = SamplerRecord(base_model=record.base_model, path=str(ref))
        self.sessions.add_sampler(session, operation.number, sampler)
        return results.SaveResult(model=record.model, name=ref.relative_name, sampler=name)

    async def _sync(self, record: ModelRecord, operation: requests.SyncWeights) -> results.Result:
        self.models.check_not_corrupted(record)
        sent = target_endpoints(self.store, record.owner, operation.pools, self.allowed_hosts)
        order = commands.WeightSyncCommand(
            endpoints=tuple(endpoint for endpoint, _ in sent),
            api_keys=tuple(key for _, key in sent),
            **common_fields(operation, commands.WeightSyncCommand),
        )
        try:
            return await self.workers.run(order, results.SyncWeightsResult)
        except WorkersLostError:
            resume_inference_servers(sent, operation.group_name)
            raise

    def _is_unsaved(self, record: ModelRecord) -> bool:
        # A model that was restored and not changed since is already saved, under its own name.
        start = record.start
        if record.is_unsaved or start is None or not start.optimizer:
            return True
        is_own = parse_checkpoint_path(start.path).model == record.model
        return not is_own or not self.checkpoints.exists(start)


def _rank(lora: LoraConfig | None) -> str:
    return "all weights" if lora is None else f"an adapter of rank {lora.rank}"
