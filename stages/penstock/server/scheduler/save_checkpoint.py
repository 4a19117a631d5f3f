"""Save checkpoints: training checkpoints and sampler weights. Free space is checked before writing.
A checkpoint gets its name only when it is complete."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from penstock.server.protocol.results import Done
from penstock.server.protocol.worker_commands import ExportCommand, SaveCheckpointCommand
from penstock.server.scheduler.checkpoint_names import CheckpointRef, Subfolder
from penstock.server.scheduler.errors import RequestError
from penstock.server.scheduler.models import Models
from penstock.server.scheduler.state_store import (
    CheckpointRecord,
    ModelRecord,
    ResumePoint,
    StateStore,
)
from penstock.server.scheduler.storage import Storage, TrashCollector, discard
from penstock.server.scheduler.worker_client import WorkerClient

NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True)
class CheckpointSaver:
    """Saves checkpoints of all models."""

    workers: WorkerClient
    store: StateStore
    storage: Storage
    models: Models
    trash: TrashCollector

    async def training(
        self,
        record: ModelRecord,
        name: str | None,
        *,
        overwrite: bool = False,
        ttl_seconds: float | None = None,
        user_metadata: Mapping[str, str] = NOTHING,
    ) -> CheckpointRef:
        """Save a checkpoint, from which it is restored if the workers die. Raises RequestError."""
        ref = self._new_ref(record, "weights", name, overwrite)
        step = self.models.get_state(record).step
        metadata: dict[str, str | int | float | bool | None] = {
            "model": record.model,
            "base_model": record.base_model,
            "rank": record.lora.rank if record.lora else None,
            "step": step,
        }
        temp_folder = await self._prepare_temp_folder(
            ref, record.state_bytes, f"a checkpoint of {ref.model}"
        )
        await self.workers.run(
            SaveCheckpointCommand(model=record.model, folder=str(temp_folder), metadata=metadata),
            Done,
        )
        checkpoint = await self._publish(record, ref, ttl_seconds, user_metadata, step, None)
        start = ResumePoint(path=str(ref), optimizer=True, time=checkpoint.time)
        self.models.set_resume_point(record, start, step=step)
        return ref

    async def sampler(
        self,
        record: ModelRecord,
        name: str | None,
        *,
        ttl_seconds: float | None = None,
        user_metadata: Mapping[str, str] = NOTHING,
        only_for: str | None = None,
    ) -> CheckpointRef:
        """Save sampler weights, deleted with the sampler `only_for`. Raises RequestError."""
        ref = self._new_ref(record, "sampler_weights", name, overwrite=False)
        step = self.models.get_state(record).step
        temp_folder = await self._prepare_temp_folder(
            ref, record.export_bytes, f"an export of {ref.model}"
        )
        await self.workers.run(ExportCommand(model=record.model, folder=str(temp_folder)), Done)
        await self._publish(record, ref, ttl_seconds, user_metadata, step, only_for)
        return ref

    def _new_ref(
        self, record: ModelRecord, subfolder: Subfolder, name: str | None, overwrite: bool
    ) -> CheckpointRef:
        if name is not None:
            ref = CheckpointRef(record.model, subfolder, name)
            if not overwrite and self._is_taken(record, ref):
                raise RequestError(
                    "exists", f"{ref} exists already.\n  Choose another name, or set overwrite."
                )
            return ref
        now = datetime.now(UTC)
        stamp = f"checkpoint-{now:%Y%m%dT%H%M%S}"
        # Several may be saved within one second.
        names = [stamp, *(f"{stamp}-{number}" for number in range(2, 10_000))]
        refs = (CheckpointRef(record.model, subfolder, name) for name in names)
        return next(ref for ref in refs if not self._is_taken(record, ref))

    async def _prepare_temp_folder(self, ref: CheckpointRef, needed: int, purpose: str) -> Path:
        """A new temporary folder for `needed` bytes. Raises RequestError."""
        # Folders being deleted still use space.
        await self.trash.done()
        await asyncio.to_thread(self.storage.check_space, needed, purpose)
        temp_folder = self.storage.temp_folder(ref)
        await asyncio.to_thread(discard, temp_folder)
        return temp_folder

    def _is_taken(self, record: ModelRecord, ref: CheckpointRef) -> bool:
        return ref.relative_name in record.checkpoints or self.storage.folder(ref).exists()

    async def _publish(
        self,
        record: ModelRecord,
        ref: CheckpointRef,
        ttl_seconds: float | None,
        user_metadata: Mapping[str, str],
        step: int,
        only_for: str | None,
    ) -> CheckpointRecord:
        if not self.storage.temp_folder(ref).is_dir():
            raise RequestError(
                "internal",
                f"the workers saved {ref}, but it is not in output_dir.\n"
                "  Put output_dir on a file system that all processes share.",
            )
        # In a thread: meanwhile the loop answers heartbeats, and an old checkpoint takes long to
        # delete.
        await asyncio.to_thread(self.storage.publish, ref)
        now = time.time()
        checkpoint = record.checkpoints[ref.relative_name] = CheckpointRecord(
            time=now,
            size=await asyncio.to_thread(self.storage.size, ref),
            base_model=record.base_model,
            lora=record.lora,
            step=step,
            expires=None if ttl_seconds is None else now + ttl_seconds,
            sampler=only_for,
            user_metadata=dict(user_metadata),
        )
        self.store.save_model(record)
        return checkpoint
