"""Training requests as worker commands. Called one at a time."""

import logging
import time
from collections.abc import Collection
from functools import partial

from msgspec import structs

from penstock.server.protocol.requests import (
    CreateModel,
    DropGradients,
    LoadState,
    Pass,
    SaveSampler,
    SaveState,
    Step,
    SyncWeights,
    UnloadModel,
)
from penstock.server.protocol.results import (
    Done,
    Loaded,
    ModelMade,
    Passed,
    Result,
    Saved,
    Served,
    Stepped,
)
from penstock.server.protocol.types import Lora
from penstock.server.protocol.worker_commands import (
    Close,
    ForwardBackwardCommand,
    Load,
    Open,
    Opened,
    OptimStepCommand,
    WeightSyncCommand,
    ZeroGradCommand,
)
from penstock.server.scheduler.checkpoint_catalog import Checkpoints
from penstock.server.scheduler.checkpoint_names import INITIAL, CheckpointRef, parse_checkpoint_path
from penstock.server.scheduler.errors import RequestError, WorkersLostError
from penstock.server.scheduler.inference_endpoints import (
    list_endpoints,
    resume_inference_servers,
    target_endpoints,
)
from penstock.server.scheduler.models import Models
from penstock.server.scheduler.pack_rows import pack
from penstock.server.scheduler.save_checkpoint import Saving
from penstock.server.scheduler.sessions import Sessions
from penstock.server.scheduler.settings import EngineSettings
from penstock.server.scheduler.state_store import (
    CheckpointRecord,
    ModelRecord,
    Registry,
    SamplerRecord,
    Start,
)
from penstock.server.scheduler.worker_client import Workers

Trained = (
    Pass | Step | DropGradients | SaveState | LoadState | SaveSampler | SyncWeights | UnloadModel
)
"""Requests for an existing model."""

SYNCED = "weights_synced"
"""The step metric that says whether the weights were synced to inference servers."""

LOG = logging.getLogger(__name__)


class Training:
    """Runs training requests."""

    def __init__(
        self,
        settings: EngineSettings,
        workers: Workers,
        registry: Registry,
        sessions: Sessions,
        models: Models,
        checkpoints: Checkpoints,
        saving: Saving,
        allowed_hosts: Collection[str],
    ) -> None:
        """`allowed_hosts`: allowed inference servers."""
        self._settings = settings
        self._allowed_hosts = allowed_hosts
        self._workers = workers
        self._registry = registry
        self._sessions = sessions
        self._models = models
        self._checkpoints = checkpoints
        self._saving = saving

    async def do(self, work: Trained, owner: str, why: str) -> Result:
        """Run a request. `why`: the reason for unloading a model. Raises RequestError."""
        record = self._models.find_open(work.model, owner)
        record.last_request = time.time()
        match work:
            case Pass():
                return await self._pass(record, work)
            case Step():
                return await self._step(record, work)
            case DropGradients():
                return await self._drop_gradients(record)
            case SaveState():
                self._models.check_known(record)
                spot = await self._saving.training(
                    record,
                    work.name,
                    overwrite=work.overwrite,
                    ttl_seconds=work.ttl_seconds,
                    user_metadata=work.user_metadata,
                )
                return Saved(model=record.model, name=spot.within)
            case LoadState():
                return await self._load_state(record, work, owner)
            case SaveSampler():
                return await self._save_sampler(record, work, owner)
            case SyncWeights():
                return await self._sync(record, work)
            case UnloadModel():
                return await self._unload(record, work, why)

    def is_repeatable(self, work: Trained | CreateModel) -> bool:
        """Whether a request that was lost with the workers can be retried once they are restored:
        it changed no unsaved state, or does not depend on the model's previous state."""
        if isinstance(work, CreateModel):
            return True
        record = self._models.known(work.model)
        if record is None or not record.is_open:
            return False
        return isinstance(work, LoadState) or not (record.is_unsaved or record.corrupted)

    def unsaved(self) -> list[ModelRecord]:
        """Loaded models with unsaved changes, most recently requested first."""
        return [record for record in self._models.open() if self._is_unsaved(record)]

    async def save(self, record: ModelRecord) -> CheckpointRef:
        """Save it under a timestamp name. Raises RequestError."""
        return await self._saving.training(record, None)

    async def create(self, work: CreateModel, record: ModelRecord, owner: str) -> Result:
        """Create a model. `record` is saved on success. Raises RequestError."""
        found = None if work.path is None else self._checkpoints.read(work.path, owner)
        served = self._served()
        record.base_model = served.base_model
        record.lora = self._lora(work.lora, found, served)
        if found is not None:
            self._check_fits(record, *found)
        instance = self._instance()
        sizes: Opened = await self._workers.command(
            Open(model=record.model, lora=record.lora, optimizer_config=record.optimizer_config)
        )
        known = self._registry.models.get(record.model)
        if known is not None:
            record.checkpoints = known.checkpoints
        try:
            if found is not None:
                record.start = await self._load(record, *found, optimizer=work.optimizer)
                record.step = found[1].step if work.optimizer else 0
            self._models.opened(record, instance, sizes)
            if not self._settings.skip_initial_checkpoint:
                await self._saving.training(record, INITIAL, overwrite=True)
        except (RequestError, OSError) as error:
            await self._take_back(record, known, error)
            raise
        return ModelMade(model=record.model)

    async def _take_back(
        self, record: ModelRecord, known: ModelRecord | None, error: Exception
    ) -> None:
        """Undo a partial creation."""
        if self._registry.models.get(record.model) is record:
            if known is None and not record.checkpoints:
                self._registry.drop_model(record.model)
            else:
                self._models.closed(record, "it could not be made")
        if not isinstance(error, WorkersLostError):
            try:
                await self._workers.command(Close(model=record.model))
            except RequestError as another:
                LOG.warning("model %s is not closed: %s", record.model, another)

    def _lora(
        self,
        asked: Lora | None,
        found: tuple[CheckpointRef, CheckpointRecord] | None,
        served: Served,
    ) -> Lora | None:
        """The LoRA config of a new model, as requested, or that of its checkpoint."""
        if served.trains == "all weights":
            return None
        kept = found[1].lora if found else None
        lora = asked or kept or Lora(rank=served.max_rank)
        if kept is None or kept.alpha is None:
            return lora
        if lora.alpha not in (None, kept.alpha):
            raise RequestError(
                "invalid", f"the checkpoint's alpha is {kept.alpha}, and {lora.alpha} is asked for"
            )
        return structs.replace(lora, alpha=kept.alpha)

    def _check_fits(self, record: ModelRecord, spot: CheckpointRef, kept: CheckpointRecord) -> None:
        """Raises RequestError if a model cannot load a checkpoint."""
        if spot.room != "weights":
            raise RequestError(
                "invalid",
                f"{spot} is for sampling; training goes on from <model>/weights/<name>",
            )
        if kept.base_model != record.base_model:
            raise RequestError(
                "invalid", f"{spot} is of {kept.base_model}, and here is {record.base_model}"
            )
        ours, theirs = record.lora, kept.lora
        if (ours and ours.rank) != (theirs and theirs.rank):
            raise RequestError(
                "invalid",
                f"{spot} is {_rank(theirs)}, and model {record.model} {_rank(ours)}.\n"
                "  Create a model of that kind from it.",
            )

    async def _pass(self, record: ModelRecord, work: Pass) -> Result:
        self._models.check_known(record)
        lengths = [datum.tokens.shape[0] for datum in work.data]
        ready = self._workers.ready
        rows = pack(lengths, self._settings, ready.replicas if ready else 1)
        order = ForwardBackwardCommand(
            model=record.model,
            data=work.data,
            rows=rows,
            loss=work.loss,
            params=work.params,
            forward_only=work.forward_only,
            per=work.per,
        )
        if work.forward_only:
            return await self._passed(order)
        live = self._models.live(record)
        with self._models.changing(record):
            passed = await self._passed(order)
            live.has_gradients, live.lost_gradients = True, False
        return passed

    async def _passed(self, order: ForwardBackwardCommand) -> Passed:
        passed = await self._workers.command(order)
        if not isinstance(passed, Passed) or len(passed.outputs) != len(order.data):
            raise RequestError("internal", "the workers answered a pass with something else")
        return passed

    async def _step(self, record: ModelRecord, work: Step) -> Result:
        self._models.check_known(record)
        self._models.check_gradients(record)
        live = self._models.live(record)
        try:
            with self._models.changing(record):
                stepped = await self._workers.command(
                    OptimStepCommand(model=record.model, adam=work.adam)
                )
        except RequestError as error:
            if error.code == "not_finite":
                # The workers have dropped those gradients.
                live.has_gradients = False
            raise
        if not isinstance(stepped, Stepped):
            raise RequestError("internal", "the workers answered a step with something else")
        live.has_gradients = False
        live.step = int(stepped.metrics.get("step", live.step + 1))
        if work.sync is not None:
            synced = await self._synced_after_step(record, work.sync)
            stepped = structs.replace(stepped, metrics=stepped.metrics | synced)
        return stepped

    async def _synced_after_step(self, record: ModelRecord, work: SyncWeights) -> dict[str, float]:
        """Whether the weights were synced. The step was taken either way, so a failed sync must not
        look like a failed step."""
        if not list_endpoints(self._registry, record.owner, work.pools):
            return {}
        try:
            await self._sync(record, work)
        except WorkersLostError:
            raise
        except RequestError as error:
            LOG.warning("model %s after a step: %s", record.model, error)
            return {SYNCED: 0.0}
        return {SYNCED: 1.0}

    async def _drop_gradients(self, record: ModelRecord) -> Result:
        with self._models.changing(record):
            await self._workers.command(ZeroGradCommand(model=record.model))
        live = self._models.live(record)
        live.has_gradients = live.lost_gradients = False
        return Done()

    async def _load(
        self, record: ModelRecord, spot: CheckpointRef, kept: CheckpointRecord, *, optimizer: bool
    ) -> Start:
        folder = str(self._checkpoints.folder(spot))
        await self._workers.command(Load(model=record.model, folder=folder, optimizer=optimizer))
        return Start(path=str(spot), optimizer=optimizer, time=kept.time)

    async def _load_state(self, record: ModelRecord, work: LoadState, owner: str) -> Result:
        spot, kept = self._checkpoints.read(work.path, owner)
        self._check_fits(record, spot, kept)
        with self._models.changing(record):
            start = await self._load(record, spot, kept, optimizer=work.optimizer)
        live = self._models.live(record)
        live.has_gradients = live.lost_gradients = False
        live.step = kept.step if work.optimizer else 0
        record.corrupted = False
        self._models.goes_on_from(record, start, step=live.step)
        return Loaded(model=record.model, name=spot.within)

    async def _save_sampler(self, record: ModelRecord, work: SaveSampler, owner: str) -> Result:
        self._models.check_known(record)
        session = None if work.session is None else self._sessions.find(work.session, owner)
        save = partial(
            self._saving.sampler,
            record,
            work.name,
            ttl_seconds=work.ttl_seconds,
            user_metadata=work.user_metadata,
        )
        if session is None or work.number is None:
            return Saved(model=record.model, name=(await save()).within)
        name = self._sessions.free_sampler(session, work.number)
        spot = await save(only_for=None if work.keep else name)
        sampler = SamplerRecord(base_model=record.base_model, path=str(spot))
        self._sessions.add_sampler(session, work.number, sampler)
        return Saved(model=record.model, name=spot.within, sampler=name)

    async def _sync(self, record: ModelRecord, work: SyncWeights) -> Result:
        self._models.check_known(record)
        sent = target_endpoints(self._registry, record.owner, work.pools, self._allowed_hosts)
        order = WeightSyncCommand(
            model=record.model,
            endpoints=tuple(endpoint for endpoint, _ in sent),
            master_address=work.master_address,
            master_port=work.master_port,
            group_name=work.group_name,
            buffer_size_mb=work.buffer_size_mb,
            flush_cache=work.flush_cache,
            pause_mode=work.pause_mode,
            weight_version=work.weight_version,
            quantization=work.quantization,
            api_keys=tuple(key for _, key in sent),
        )
        try:
            return await self._workers.command(order)
        except WorkersLostError:
            resume_inference_servers(sent, work.group_name)
            raise

    async def _unload(self, record: ModelRecord, work: UnloadModel, why: str) -> Result:
        if work.save and self._is_unsaved(record):
            await self.save(record)
        await self._workers.command(Close(model=record.model))
        self._models.closed(record, why)
        return Done()

    def _is_unsaved(self, record: ModelRecord) -> bool:
        """A model that was restored and not changed since is already saved, under its own name."""
        start = record.start
        if record.is_unsaved or start is None or not start.optimizer:
            return True
        is_own = parse_checkpoint_path(start.path).model == record.model
        return not is_own or not self._checkpoints.holds(start)

    def _served(self) -> Served:
        if self._workers.ready is None:
            raise WorkersLostError("the workers are not there")
        return self._workers.ready.served

    def _instance(self) -> str:
        return self._workers.ready.instance if self._workers.ready else ""


def _rank(lora: Lora | None) -> str:
    return "all weights" if lora is None else f"an adapter of rank {lora.rank}"
