"""Recovery: reconciles the workers' models with the records after a restart of either side.

Each model is restored from its last checkpoint, or from its initial state. A model that the workers
still hold unchanged is kept.
"""

import logging
from dataclasses import dataclass

from penstock.server.protocol.results import Done
from penstock.server.protocol.worker_commands import (
    CheckpointSizes,
    LoadCheckpointCommand,
    Ready,
    UnloadModelCommand,
)
from penstock.server.scheduler.checkpoint_catalog import CheckpointCatalog
from penstock.server.scheduler.checkpoint_names import parse_checkpoint_path
from penstock.server.scheduler.errors import RequestError, WorkersLostError
from penstock.server.scheduler.models import Models
from penstock.server.scheduler.state_store import ModelRecord, StateStore, build_create_command
from penstock.server.scheduler.validate_request import check_base
from penstock.server.scheduler.worker_client import WorkerClient

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recovery:
    """Restores models."""

    workers: WorkerClient
    store: StateStore
    models: Models
    checkpoints: CheckpointCatalog

    async def restore(self, ready: Ready) -> list[str]:
        """Restore the models; returns the restored ones. Raises WorkersLostError."""
        interrupted = self.store.read_interrupted_change()
        loaded = {record.model: record for record in self.models.open()}
        intact = {
            name
            for name, record in loaded.items()
            if name in ready.models and record.instance == ready.instance and name != interrupted
        }
        for name in ready.models:
            if name not in intact:
                await self._close(name)
        restored: list[str] = []
        for name, record in loaded.items():
            if name in intact:
                self.models.adopt(
                    record,
                    step=ready.steps.get(name, record.step),
                    has_gradients=name in ready.models_with_gradients,
                )
            else:
                await self._open(record, ready, was_changing=name == interrupted)
                restored.append(name)
        # After all: if the workers die while models are restored, the next restore needs the note.
        self.store.end()
        return restored

    async def _close(self, model: str) -> None:
        try:
            await self.workers.run(UnloadModelCommand(model=model), Done)
        except WorkersLostError:
            raise
        except RequestError as error:
            LOG.warning("model %s is not unloaded: %s", model, error)

    async def _open(self, record: ModelRecord, ready: Ready, *, was_changing: bool) -> None:
        """Restore a model; if it cannot be restored, it is unloaded with the reason."""
        is_held = False
        try:
            check_base(record.base_model, [ready.served.base_model])
            sizes = await self.workers.run(build_create_command(record), CheckpointSizes)
            is_held = True
            await self._load(record)
        except WorkersLostError:
            raise
        except RequestError as error:
            LOG.warning("model %s is not restored: %s", record.model, error)
            self.models.mark_unloaded(record, f"it could not be restored: {error}")
            if is_held:
                await self._close(record.model)
            return
        self.models.mark_restored(record, ready.instance, sizes, was_changing=was_changing)
        LOG.info("model %s is restored at step %d", record.model, record.step)

    async def _load(self, record: ModelRecord) -> None:
        start = record.start
        if start is not None and not self.checkpoints.exists(start):
            # Its checkpoint was deleted or overwritten: the newest existing one is closest to it.
            start = self.checkpoints.newest(record)
            record.start, record.is_unsaved = start, True
            record.step = 0
            if start is not None:
                ref = parse_checkpoint_path(start.path)
                record.step = record.checkpoints[ref.relative_name].step
        if start is not None:
            folder = str(self.checkpoints.folder(parse_checkpoint_path(start.path)))
            await self.workers.run(
                LoadCheckpointCommand(model=record.model, folder=folder, optimizer=start.optimizer),
                Done,
            )
