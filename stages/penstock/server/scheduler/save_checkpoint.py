"""Save checkpoints: training checkpoints and sampler weights.

Free space is checked before writing. A checkpoint gets its name only when it is complete.
"""

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from penstock.server.protocol.worker_commands import Export, Save
from penstock.server.scheduler.checkpoint_names import CheckpointRef, Room
from penstock.server.scheduler.errors import RequestError
from penstock.server.scheduler.models import Models
from penstock.server.scheduler.state_store import CheckpointRecord, ModelRecord, Registry, Start
from penstock.server.scheduler.storage import Storage, TrashCollector, discard
from penstock.server.scheduler.worker_client import Workers

NOTHING: Mapping[str, str] = {}


class Saving:
    """Saves checkpoints of all models."""

    def __init__(
        self,
        workers: Workers,
        registry: Registry,
        storage: Storage,
        models: Models,
        discarding: TrashCollector,
    ) -> None:
        self._workers = workers
        self._registry = registry
        self._storage = storage
        self._models = models
        self._discarding = discarding

    async def training(
        self,
        record: ModelRecord,
        name: str | None,
        *,
        overwrite: bool = False,
        ttl_seconds: float | None = None,
        user_metadata: Mapping[str, str] = NOTHING,
    ) -> CheckpointRef:
        """Save a training checkpoint, from which the model is restored if the workers die. Raises
        RequestError."""
        live = self._models.live(record)
        spot = self._spot(record, "weights", name, overwrite)
        step = live.step
        facts: dict[str, str | int | float | bool | None] = {
            "model": record.model,
            "base_model": record.base_model,
            "rank": record.lora.rank if record.lora else None,
            "step": step,
        }
        aside = await self._aside(spot, record.state_bytes, f"a checkpoint of {spot.model}")
        await self._workers.command(Save(model=record.model, folder=str(aside), facts=facts))
        kept = await self._publish(record, spot, ttl_seconds, user_metadata, step, None)
        start = Start(path=str(spot), optimizer=True, time=kept.time)
        self._models.goes_on_from(record, start, step=step)
        return spot

    async def sampler(
        self,
        record: ModelRecord,
        name: str | None,
        *,
        ttl_seconds: float | None = None,
        user_metadata: Mapping[str, str] = NOTHING,
        only_for: str | None = None,
    ) -> CheckpointRef:
        """Save sampler weights; `only_for`: a sampler with which they are deleted.

        Raises RequestError.
        """
        live = self._models.live(record)
        spot = self._spot(record, "sampler_weights", name, overwrite=False)
        aside = await self._aside(spot, record.export_bytes, f"an export of {spot.model}")
        await self._workers.command(Export(model=record.model, folder=str(aside)))
        await self._publish(record, spot, ttl_seconds, user_metadata, live.step, only_for)
        return spot

    def _spot(
        self, record: ModelRecord, room: Room, name: str | None, overwrite: bool
    ) -> CheckpointRef:
        if name is not None:
            spot = CheckpointRef(record.model, room, name)
            if not overwrite and self._is_taken(record, spot):
                raise RequestError(
                    "exists",
                    f"{spot} is there already.\n  Choose another name, or have it overwritten.",
                )
            return spot
        now = datetime.now(UTC)
        stamp = f"checkpoint-{now:%Y%m%dT%H%M%S}"
        names = [stamp, *(f"{stamp}-{number}" for number in range(2, 10_000))]
        spots = (CheckpointRef(record.model, room, each) for each in names)
        return next(spot for spot in spots if not self._is_taken(record, spot))

    async def _aside(self, spot: CheckpointRef, needed: int, what: str) -> Path:
        """A new temporary folder for `needed` bytes. Raises StorageLimitError."""
        # Folders being deleted still use space.
        await self._discarding.done()
        await asyncio.to_thread(self._storage.check_room, needed, what)
        aside = self._storage.aside(spot)
        await asyncio.to_thread(discard, aside)
        return aside

    def _is_taken(self, record: ModelRecord, spot: CheckpointRef) -> bool:
        return spot.within in record.checkpoints or self._storage.folder(spot).exists()

    async def _publish(
        self,
        record: ModelRecord,
        spot: CheckpointRef,
        ttl_seconds: float | None,
        user_metadata: Mapping[str, str],
        step: int,
        only_for: str | None,
    ) -> CheckpointRecord:
        if not self._storage.aside(spot).is_dir():
            raise RequestError(
                "internal",
                f"the workers saved {spot}, and it is not in output_dir.\n"
                "  Have output_dir on a file system that all processes share.",
            )
        await asyncio.to_thread(self._storage.publish, spot)
        now = time.time()
        kept = record.checkpoints[spot.within] = CheckpointRecord(
            time=now,
            size=await asyncio.to_thread(self._storage.size, spot),
            base_model=record.base_model,
            lora=record.lora,
            step=step,
            expires=None if ttl_seconds is None else now + ttl_seconds,
            sampler=only_for,
            user_metadata=dict(user_metadata),
        )
        self._registry.keep_model(record)
        return kept
