"""Training requests as worker commands. Called one at a time."""

import logging
import time
from collections.abc import Collection
from functools import partial
from typing import Any

from msgspec import structs

from penstock.server.protocol.codec import Message
from penstock.server.protocol.requests import (
    CreateModel,
    ForwardBackward,
    LoadState,
    OptimStep,
    SaveSamplerWeights,
    SaveState,
    SyncWeights,
    TrainingOperation,
    UnloadModel,
    WeightSyncOptions,
    ZeroGrad,
)
from penstock.server.protocol.results import (
    CreateModelResult,
    Done,
    ForwardBackwardResult,
    OptimStepResult,
    Result,
    SaveResult,
    ServedModel,
)
from penstock.server.protocol.types import LoraConfig
from penstock.server.protocol.worker_commands import (
    CheckpointSizes,
    CreateModelCommand,
    ForwardBackwardCommand,
    LoadCheckpointCommand,
    UnloadModelCommand,
    WeightSyncCommand,
)
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
)
from penstock.server.scheduler.worker_client import WorkerClient

SYNCED = "weights_synced"
"""The step metric that says whether the weights were synced to inference servers."""

LOG = logging.getLogger(__name__)


class TrainingRequests:
    """Runs training requests."""

    def __init__(
        self,
        settings: SchedulerSettings,
        workers: WorkerClient,
        store: StateStore,
        sessions: Sessions,
        models: Models,
        checkpoints: CheckpointCatalog,
        saver: CheckpointSaver,
        allowed_hosts: Collection[str],
    ) -> None:
        """`allowed_hosts`: allowed inference servers."""
        self._settings = settings
        self._allowed_hosts = allowed_hosts
        self._workers = workers
        self._store = store
        self._sessions = sessions
        self._models = models
        self._checkpoints = checkpoints
        self._saver = saver

    async def run(self, operation: TrainingOperation, owner: str, why: str) -> Result:
        """Run a request. `why`: the reason for unloading a model. Raises RequestError."""
        record = self._models.find_open(operation.model, owner)
        record.last_request = time.time()
        match operation:
            case ForwardBackward():
                return await self._pass(record, operation)
            case OptimStep():
                return await self._step(record, operation)
            case ZeroGrad():
                return await self._zero_grad(record)
            case SaveState():
                self._models.check_not_corrupted(record)
                ref = await self._saver.training(
                    record,
                    operation.name,
                    overwrite=operation.overwrite,
                    ttl_seconds=operation.ttl_seconds,
                    user_metadata=operation.user_metadata,
                )
                return SaveResult(model=record.model, name=ref.relative_name)
            case LoadState():
                return await self._load_state(record, operation, owner)
            case SaveSamplerWeights():
                return await self._save_sampler(record, operation, owner)
            case SyncWeights():
                return await self._sync(record, operation)
            case UnloadModel():
                return await self._unload(record, operation, why)

    def is_repeatable(self, operation: TrainingOperation | CreateModel) -> bool:
        """Whether a request that was lost with the workers can be retried once they are restored:
        it changed no unsaved state, or does not depend on the model's previous state."""
        if isinstance(operation, CreateModel):
            return True
        record = self._models.get(operation.model)
        if record is None or not record.is_open:
            return False
        return isinstance(operation, LoadState) or not (record.is_unsaved or record.corrupted)

    def unsaved(self) -> list[ModelRecord]:
        """Loaded models with unsaved changes, most recently requested first."""
        return [record for record in self._models.open() if self._is_unsaved(record)]

    async def save(self, record: ModelRecord) -> CheckpointRef:
        """Save it under a timestamp name. Raises RequestError."""
        return await self._saver.training(record, None)

    async def create(self, operation: CreateModel, record: ModelRecord, owner: str) -> Result:
        """Create a model. `record` is saved on success. Raises RequestError."""
        start = None if operation.path is None else self._checkpoints.read(operation.path, owner)
        served = self._served()
        record.base_model = served.base_model
        record.lora = self._lora(operation.lora, start, served)
        if start is not None:
            self._check_fits(record, *start)
        instance = self._instance()
        sizes: CheckpointSizes = await self._workers.run(
            CreateModelCommand(
                model=record.model, lora=record.lora, optimizer_config=record.optimizer_config
            )
        )
        previous = self._store.models.get(record.model)
        if previous is not None:
            record.checkpoints = previous.checkpoints
        try:
            if start is not None:
                record.start = await self._load(record, *start, optimizer=operation.optimizer)
                record.step = start[1].step if operation.optimizer else 0
            self._models.mark_loaded(record, instance, sizes)
            if not self._settings.skip_initial_checkpoint:
                await self._saver.training(record, INITIAL, overwrite=True)
        except (RequestError, OSError) as error:
            await self._undo_create(record, previous, error)
            raise
        return CreateModelResult(model=record.model)

    async def _undo_create(
        self, record: ModelRecord, previous: ModelRecord | None, error: Exception
    ) -> None:
        """Undo a partial creation."""
        if self._store.models.get(record.model) is record:
            if previous is None and not record.checkpoints:
                self._store.delete_model(record.model)
            else:
                self._models.mark_unloaded(record, "it could not be created")
        if not isinstance(error, WorkersLostError):
            try:
                await self._workers.run(UnloadModelCommand(model=record.model))
            except RequestError as unload_error:
                LOG.warning("model %s is not unloaded: %s", record.model, unload_error)

    def _lora(
        self,
        requested: LoraConfig | None,
        start: tuple[CheckpointRef, CheckpointRecord] | None,
        served: ServedModel,
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
                "invalid",
                f"{ref} is for sampling; training resumes from <model>/weights/<name>",
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

    async def _pass(self, record: ModelRecord, operation: ForwardBackward) -> Result:
        self._models.check_not_corrupted(record)
        lengths = [datum.tokens.shape[0] for datum in operation.data]
        ready = self._workers.ready
        rows = pack(lengths, self._settings, ready.replicas if ready else 1)
        order = ForwardBackwardCommand(rows=rows, **_fields(operation, ForwardBackward))
        if operation.forward_only:
            return await self._run_pass(order)
        live = self._models.get_state(record)
        with self._models.modifying(record):
            passed = await self._run_pass(order)
            live.has_gradients, live.lost_gradients = True, False
        return passed

    async def _run_pass(self, order: ForwardBackwardCommand) -> ForwardBackwardResult:
        passed = await self._workers.run(order)
        if not isinstance(passed, ForwardBackwardResult) or len(passed.outputs) != len(order.data):
            raise RequestError(
                "internal", "the workers returned another result for a forward-backward pass"
            )
        return passed

    async def _step(self, record: ModelRecord, operation: OptimStep) -> Result:
        self._models.check_not_corrupted(record)
        self._models.check_gradients(record)
        live = self._models.get_state(record)
        try:
            with self._models.modifying(record):
                stepped = await self._workers.run(
                    OptimStep(model=record.model, adam=operation.adam)
                )
        except RequestError as error:
            if error.code == "not_finite":
                # The workers have dropped those gradients.
                live.has_gradients = False
            raise
        if not isinstance(stepped, OptimStepResult):
            raise RequestError(
                "internal", "the workers returned another result for an optimizer step"
            )
        live.has_gradients = False
        live.step = int(stepped.metrics.get("step", live.step + 1))
        if operation.sync is not None:
            synced = await self._sync_after_step(record, operation.sync)
            stepped = structs.replace(stepped, metrics=stepped.metrics | synced)
        return stepped

    async def _sync_after_step(
        self, record: ModelRecord, operation: SyncWeights
    ) -> dict[str, float]:
        """Whether the weights were synced. The step was taken either way, so a failed sync must not
        look like a failed step."""
        if not list_endpoints(self._store, record.owner, operation.pools):
            return {}
        try:
            await self._sync(record, operation)
        except WorkersLostError:
            raise
        except RequestError as error:
            LOG.warning("model %s after a step: %s", record.model, error)
            return {SYNCED: 0.0}
        return {SYNCED: 1.0}

    async def _zero_grad(self, record: ModelRecord) -> Result:
        with self._models.modifying(record):
            await self._workers.run(ZeroGrad(model=record.model))
        live = self._models.get_state(record)
        live.has_gradients = live.lost_gradients = False
        return Done()

    async def _load(
        self,
        record: ModelRecord,
        ref: CheckpointRef,
        checkpoint: CheckpointRecord,
        *,
        optimizer: bool,
    ) -> ResumePoint:
        folder = str(self._checkpoints.folder(ref))
        await self._workers.run(
            LoadCheckpointCommand(model=record.model, folder=folder, optimizer=optimizer)
        )
        return ResumePoint(path=str(ref), optimizer=optimizer, time=checkpoint.time)

    async def _load_state(self, record: ModelRecord, operation: LoadState, owner: str) -> Result:
        ref, checkpoint = self._checkpoints.read(operation.path, owner)
        self._check_fits(record, ref, checkpoint)
        with self._models.modifying(record):
            start = await self._load(record, ref, checkpoint, optimizer=operation.optimizer)
        live = self._models.get_state(record)
        live.has_gradients = live.lost_gradients = False
        live.step = checkpoint.step if operation.optimizer else 0
        record.corrupted = False
        self._models.set_resume_point(record, start, step=live.step)
        return CreateModelResult(model=record.model)

    async def _save_sampler(
        self, record: ModelRecord, operation: SaveSamplerWeights, owner: str
    ) -> Result:
        self._models.check_not_corrupted(record)
        session = (
            None if operation.session is None else self._sessions.find(operation.session, owner)
        )
        save = partial(
            self._saver.sampler,
            record,
            operation.name,
            ttl_seconds=operation.ttl_seconds,
            user_metadata=operation.user_metadata,
        )
        if session is None or operation.number is None:
            return SaveResult(model=record.model, name=(await save()).relative_name)
        name = self._sessions.new_sampler_name(session, operation.number)
        ref = await save(only_for=None if operation.keep else name)
        sampler = SamplerRecord(base_model=record.base_model, path=str(ref))
        self._sessions.add_sampler(session, operation.number, sampler)
        return SaveResult(model=record.model, name=ref.relative_name, sampler=name)

    async def _sync(self, record: ModelRecord, operation: SyncWeights) -> Result:
        self._models.check_not_corrupted(record)
        sent = target_endpoints(self._store, record.owner, operation.pools, self._allowed_hosts)
        order = WeightSyncCommand(
            endpoints=tuple(endpoint for endpoint, _ in sent),
            api_keys=tuple(key for _, key in sent),
            **_fields(operation, WeightSyncOptions),
        )
        try:
            return await self._workers.run(order)
        except WorkersLostError:
            resume_inference_servers(sent, operation.group_name)
            raise

    async def _unload(self, record: ModelRecord, operation: UnloadModel, why: str) -> Result:
        if operation.save and self._is_unsaved(record):
            await self.save(record)
        await self._workers.run(UnloadModelCommand(model=record.model))
        self._models.mark_unloaded(record, why)
        return Done()

    def _is_unsaved(self, record: ModelRecord) -> bool:
        """A model that was restored and not changed since is already saved, under its own name."""
        start = record.start
        if record.is_unsaved or start is None or not start.optimizer:
            return True
        is_own = parse_checkpoint_path(start.path).model == record.model
        return not is_own or not self._checkpoints.exists(start)

    def _served(self) -> ServedModel:
        if self._workers.ready is None:
            raise WorkersLostError("the workers are not connected")
        return self._workers.ready.served

    def _instance(self) -> str:
        return self._workers.ready.instance if self._workers.ready else ""


def _rank(lora: LoraConfig | None) -> str:
    return "all weights" if lora is None else f"an adapter of rank {lora.rank}"


def _fields(message: Message, kind: type[Message]) -> dict[str, Any]:
    """The fields of a message that its base class `kind` has."""
    return {name: getattr(message, name) for name in kind.__struct_fields__}
