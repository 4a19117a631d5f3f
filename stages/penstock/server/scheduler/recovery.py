"""Recovery: reconciles the workers' models with the records after a restart of either side.

Each model is restored from its last checkpoint, or from its initial state. A model that the workers
still hold unchanged is kept.
"""

import logging

from penstock.server.protocol.worker_commands import Close, Load, Open, Opened, Ready
from penstock.server.scheduler.checkpoint_catalog import Checkpoints
from penstock.server.scheduler.checkpoint_names import CheckpointRef, parse_checkpoint_path
from penstock.server.scheduler.errors import RequestError, WorkersLostError
from penstock.server.scheduler.models import Models
from penstock.server.scheduler.state_store import ModelRecord, Registry, Start
from penstock.server.scheduler.validate_request import check_base
from penstock.server.scheduler.worker_client import Workers

LOG = logging.getLogger(__name__)


class Recovery:
    """Restores models."""

    def __init__(
        self,
        workers: Workers,
        registry: Registry,
        models: Models,
        checkpoints: Checkpoints,
    ) -> None:
        self._workers = workers
        self._registry = registry
        self._models = models
        self._checkpoints = checkpoints

    async def agree(self, ready: Ready) -> list[str]:
        """Restore the models in these workers; returns the restored ones.

        Raises WorkersLostError if they die during that.
        """
        interrupted = self._registry.interrupted()
        to_hold = {record.model: record for record in self._models.open()}
        intact = {
            name
            for name, record in to_hold.items()
            if name in ready.models and record.instance == ready.instance and name != interrupted
        }
        for name in ready.models:
            if name not in intact:
                await self._close(name)
        put_back: list[str] = []
        for name, record in to_hold.items():
            if name in intact:
                step, gathers = ready.steps.get(name, record.step), name in ready.gathering
                self._models.found(record, step=step, has_gradients=gathers)
            else:
                await self._open(record, ready, was_changing=name == interrupted)
                put_back.append(name)
        self._registry.end()
        return put_back

    async def _close(self, model: str) -> None:
        try:
            await self._workers.command(Close(model=model))
        except WorkersLostError:
            raise
        except RequestError as error:
            LOG.warning("model %s is not closed: %s", model, error)

    async def _open(self, record: ModelRecord, ready: Ready, *, was_changing: bool) -> None:
        """Restore a model; if it cannot be restored, it is unloaded with the reason."""
        is_held = False
        try:
            check_base(record.base_model, [ready.served.base_model])
            sizes: Opened = await self._workers.command(
                Open(
                    model=record.model,
                    lora=record.lora,
                    optimizer_config=record.optimizer_config,
                )
            )
            is_held = True
            await self._load(record)
        except WorkersLostError:
            raise
        except RequestError as error:
            LOG.warning("model %s is not opened again: %s", record.model, error)
            self._models.closed(record, f"it could not be opened again: {error}")
            if is_held:
                await self._close(record.model)
            return
        self._models.restored(record, ready.instance, sizes, was_changing=was_changing)
        LOG.info("model %s is put back to step %d", record.model, record.step)

    async def _load(self, record: ModelRecord) -> None:
        start = record.start
        if start is not None and not self._checkpoints.holds(start):
            # Its checkpoint was deleted or overwritten: the newest existing one is closest to it.
            start = self._checkpoints.newest(record)
            record.start, record.is_unsaved = start, True
            record.step = self._step(record, start)
        if start is not None:
            folder = str(self._checkpoints.folder(parse_checkpoint_path(start.path)))
            await self._workers.command(
                Load(model=record.model, folder=folder, optimizer=start.optimizer)
            )

    def _step(self, record: ModelRecord, start: Start | None) -> int:
        if start is None:
            return 0
        spot: CheckpointRef = parse_checkpoint_path(start.path)
        return record.checkpoints[spot.within].step
