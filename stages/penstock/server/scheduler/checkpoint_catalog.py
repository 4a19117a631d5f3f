"""Checkpoint catalog: visibility, expiry and metadata of checkpoints.

Saving is in `save_checkpoint`; nothing here needs workers.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import structs

from penstock.server.protocol.types import Checkpoint, Run
from penstock.server.scheduler.checkpoint_names import CheckpointRef, parse_checkpoint_path, spot_in
from penstock.server.scheduler.errors import RequestError, not_found
from penstock.server.scheduler.state_store import CheckpointRecord, ModelRecord, Registry, Start
from penstock.server.scheduler.storage import Storage

LOG = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of all models."""

    def __init__(self, registry: Registry, storage: Storage) -> None:
        """Reconcile the records with the files on disk."""
        self._registry = registry
        self._storage = storage
        storage.tidy()
        self._agree()

    def read(self, path: str, owner: str) -> tuple[CheckpointRef, CheckpointRecord]:
        """The checkpoint at a path, if this owner may read it. Raises RequestError."""
        spot = parse_checkpoint_path(path)
        record = self._registry.models.get(spot.model)
        kept = record.checkpoints.get(spot.within) if record else None
        if record is None or kept is None or not (kept.public or record.owner == owner):
            raise not_found(f"checkpoint {spot}")
        if not self._storage.holds(spot):
            raise RequestError("not_found", f"checkpoint {spot} is not in output_dir any more")
        return spot, kept

    def folder(self, spot: CheckpointRef) -> Path:
        """Its folder. Raises RequestError if a symbolic link points outside."""
        return self._storage.folder(spot)

    def holds(self, start: Start) -> bool:
        """Whether the checkpoint that a model resumes from exists and was not replaced."""
        spot = parse_checkpoint_path(start.path)
        record = self._registry.models.get(spot.model)
        kept = record.checkpoints.get(spot.within) if record else None
        is_another = start.time is not None and (kept is None or kept.time != start.time)
        return not is_another and self._is_there(spot)

    def newest(self, record: ModelRecord) -> Start | None:
        """The newest checkpoint of a model's current configuration."""
        found = [
            (kept.time, name)
            for name, kept in record.checkpoints.items()
            if name.startswith("weights/") and kept.lora == record.lora
            if self._is_there(spot_in(record.model, name))
        ]
        if not found:
            return None
        saved, name = max(found)
        return Start(path=f"{record.model}/{name}", optimizer=True, time=saved)

    def _is_there(self, spot: CheckpointRef) -> bool:
        """A symbolic link that points outside is not a checkpoint."""
        try:
            return self._storage.holds(spot)
        except RequestError:
            return False

    def of_model(self, record: ModelRecord) -> list[Checkpoint]:
        """All checkpoints of one model, by time."""
        found = [told(record.model, name, kept) for name, kept in record.checkpoints.items()]
        return sorted(found, key=lambda checkpoint: checkpoint.time)

    def delete(self, record: ModelRecord, within: str) -> Path:
        """Remove a checkpoint from the catalog; returns its new path, to be deleted.

        Raises RequestError.
        """
        spot = self._own(record, within)
        gone = self._storage.take_out(spot)
        self._drop(record, spot)
        return gone or self._storage.folder(spot)

    def keep(
        self, record: ModelRecord, within: str, ttl_seconds: float | None, public: bool | None
    ) -> None:
        """Change expiry or visibility; see KeepCheckpoint. Raises RequestError."""
        spot = self._own(record, within)
        kept = record.checkpoints[spot.within]
        if public is not None:
            changed = structs.replace(kept, public=public)
        else:
            expires = None if ttl_seconds is None else time.time() + ttl_seconds
            changed = structs.replace(kept, expires=expires)
        record.checkpoints[spot.within] = changed
        self._registry.keep_model(record)

    def expire(self, now: float) -> list[Path]:
        """Remove checkpoints that are expired at `now`, in seconds since the epoch; returns the
        folders to delete."""
        return self._delete_where(lambda kept: kept.expires is not None and kept.expires <= now)

    def drop_samplers(self, is_there: Callable[[str], bool]) -> list[Path]:
        """Remove checkpoints of samplers that no longer exist; returns the folders to delete."""
        return self._delete_where(
            lambda kept: kept.sampler is not None and not is_there(kept.sampler)
        )

    def run(self, record: ModelRecord) -> Run:
        """A model as reported to clients."""
        found = self.of_model(record)
        of_training = [each for each in found if each.kind == "training"]
        of_samplers = [each for each in found if each.kind == "sampler"]
        return Run(
            model=record.model,
            session=record.session,
            base_model=record.base_model,
            rank=record.lora.rank if record.lora else None,
            last_request=record.last_request,
            is_open=record.is_open,
            corrupted=record.corrupted,
            user_metadata=record.user_metadata,
            last_checkpoint=of_training[-1] if of_training else None,
            last_sampler_checkpoint=of_samplers[-1] if of_samplers else None,
        )

    def _delete_where(self, is_over: Callable[[CheckpointRecord], bool]) -> list[Path]:
        gone: list[Path] = []
        for record in list(self._registry.models.values()):
            for within, kept in list(record.checkpoints.items()):
                if not is_over(kept):
                    continue
                try:
                    gone.append(self.delete(record, within))
                except RequestError as error:
                    # Another process replaced it with a symbolic link.
                    LOG.warning("%s of model %s stays: %s", within, record.model, error)
        return gone

    def _own(self, record: ModelRecord, within: str) -> CheckpointRef:
        spot = spot_in(record.model, within)
        if spot.within not in record.checkpoints:
            raise not_found(f"checkpoint {spot}")
        return spot

    def _drop(self, record: ModelRecord, spot: CheckpointRef) -> None:
        del record.checkpoints[spot.within]
        self._registry.keep_model(record)
        for other in self._registry.models.values():
            if other.start is not None and other.start.path == str(spot) and not other.is_unsaved:
                # Its state now only exists in the workers.
                other.is_unsaved = True
                self._registry.keep_model(other)

    def _agree(self) -> None:
        """Add checkpoints that a dead process has saved; drop records of deleted ones."""
        there = set(self._storage.spots())
        for record in list(self._registry.models.values()):
            known = {spot_in(record.model, within) for within in record.checkpoints}
            for spot in known - there:
                self._drop(record, spot)
            for spot in sorted(spot for spot in there - known if spot.model == record.model):
                record.checkpoints[spot.within] = CheckpointRecord(
                    time=self._storage.folder(spot).stat().st_mtime,
                    size=self._storage.size(spot),
                    base_model=record.base_model,
                    lora=record.lora,
                )
                self._registry.keep_model(record)


def told(model: str, within: str, kept: CheckpointRecord) -> Checkpoint:
    """A checkpoint as reported to clients."""
    return Checkpoint(
        name=within,
        model=model,
        kind="training" if within.startswith("weights/") else "sampler",
        time=kept.time,
        size=kept.size,
        expires=kept.expires,
        public=kept.public,
        user_metadata=kept.user_metadata,
    )
