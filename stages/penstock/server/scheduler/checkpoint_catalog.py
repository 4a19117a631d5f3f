"""Checkpoint catalog: visibility, expiry and metadata of checkpoints. Saving is in
`save_checkpoint`; nothing here needs workers."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from penstock.server.protocol.types import Checkpoint, ModelInfo, common_fields
from penstock.server.scheduler.checkpoint_names import (
    CheckpointRef,
    parse_checkpoint_name,
    parse_checkpoint_path,
)
from penstock.server.scheduler.errors import RequestError, not_found
from penstock.server.scheduler.state_store import (
    CheckpointRecord,
    ModelRecord,
    ResumePoint,
    StateStore,
)
from penstock.server.scheduler.storage import Storage

LOG = logging.getLogger(__name__)


@dataclass
class CheckpointCatalog:
    """The checkpoints of all models."""

    store: StateStore
    storage: Storage

    def __post_init__(self) -> None:
        """Reconcile the records with the files on disk."""
        self.storage.finish_interrupted()
        self._agree()

    def read(self, path: str, owner: str) -> tuple[CheckpointRef, CheckpointRecord]:
        """The checkpoint at a path, if this owner may read it. Raises RequestError."""
        ref = parse_checkpoint_path(path)
        record = self.store.models.get(ref.model)
        checkpoint = record.checkpoints.get(ref.relative_name) if record else None
        if record is None or checkpoint is None or not (checkpoint.public or record.owner == owner):
            raise not_found(f"checkpoint {ref}")
        if not self.storage.exists(ref):
            raise RequestError("not_found", f"checkpoint {ref} is not in output_dir any more")
        return ref, checkpoint

    def folder(self, ref: CheckpointRef) -> Path:
        """Its folder. Raises RequestError if a symbolic link points outside."""
        return self.storage.folder(ref)

    def exists(self, start: ResumePoint) -> bool:
        """Whether the checkpoint that a model resumes from exists and was not replaced."""
        ref = parse_checkpoint_path(start.path)
        record = self.store.models.get(ref.model)
        checkpoint = record.checkpoints.get(ref.relative_name) if record else None
        time_of_this = checkpoint.time if checkpoint else None
        return start.time in (None, time_of_this) and self._exists(ref)

    def newest(self, record: ModelRecord) -> ResumePoint | None:
        """The newest checkpoint of a model's current configuration."""
        candidates = [
            (checkpoint.time, name)
            for name, checkpoint in record.checkpoints.items()
            if name.startswith("weights/") and checkpoint.lora == record.lora
            if self._exists(parse_checkpoint_name(record.model, name))
        ]
        if not candidates:
            return None
        saved, name = max(candidates)
        return ResumePoint(path=f"{record.model}/{name}", optimizer=True, time=saved)

    def _exists(self, ref: CheckpointRef) -> bool:
        # A symbolic link that points outside is not a checkpoint.
        try:
            return self.storage.exists(ref)
        except RequestError:
            return False

    def list_for_model(self, record: ModelRecord) -> list[Checkpoint]:
        """All checkpoints of one model, by time."""
        checkpoints = [
            to_checkpoint_info(record.model, name, checkpoint)
            for name, checkpoint in record.checkpoints.items()
        ]
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.time)

    def delete(self, record: ModelRecord, relative_name: str) -> Path:
        """Drop a checkpoint; returns its new path, to be deleted. Raises RequestError."""
        ref = self._find_own(record, relative_name)
        # Before the record goes: after a kill in between, `_agree` drops the record. It would add a
        # folder again that is left without one.
        gone = self.storage.move_to_trash(ref)
        self._drop(record, ref)
        return gone or self.storage.folder(ref)

    def keep(
        self,
        record: ModelRecord,
        relative_name: str,
        ttl_seconds: float | None,
        public: bool | None,
    ) -> None:
        """Change expiry or visibility; see UpdateCheckpoint. Raises RequestError."""
        ref = self._find_own(record, relative_name)
        checkpoint = record.checkpoints[ref.relative_name]
        if public is not None:
            changed = structs.replace(checkpoint, public=public)
        else:
            expires = None if ttl_seconds is None else time.time() + ttl_seconds
            changed = structs.replace(checkpoint, expires=expires)
        record.checkpoints[ref.relative_name] = changed
        self.store.save_model(record)

    def expire(self, now: float) -> list[Path]:
        """Drop checkpoints that are expired at `now` (epoch); returns the folders to delete."""
        return self._delete_where(
            lambda checkpoint: checkpoint.expires is not None and checkpoint.expires <= now
        )

    def delete_unused_sampler_weights(self, is_there: Callable[[str], bool]) -> list[Path]:
        """Remove checkpoints of samplers that no longer exist; returns the folders to delete."""
        return self._delete_where(
            lambda checkpoint: checkpoint.sampler is not None and not is_there(checkpoint.sampler)
        )

    def model_info(self, record: ModelRecord) -> ModelInfo:
        checkpoints = self.list_for_model(record)
        of_training = [checkpoint for checkpoint in checkpoints if checkpoint.kind == "training"]
        of_samplers = [checkpoint for checkpoint in checkpoints if checkpoint.kind == "sampler"]
        return ModelInfo(
            **common_fields(record, ModelInfo),
            rank=record.lora.rank if record.lora else None,
            last_checkpoint=of_training[-1] if of_training else None,
            last_sampler_checkpoint=of_samplers[-1] if of_samplers else None,
        )

    def _delete_where(self, is_over: Callable[[CheckpointRecord], bool]) -> list[Path]:
        gone: list[Path] = []
        for record in list(self.store.models.values()):
            for relative_name, checkpoint in list(record.checkpoints.items()):
                if not is_over(checkpoint):
                    continue
                try:
                    gone.append(self.delete(record, relative_name))
                except RequestError as error:
                    # Another process replaced it with a symbolic link.
                    LOG.warning("%s of model %s stays: %s", relative_name, record.model, error)
        return gone

    def _find_own(self, record: ModelRecord, relative_name: str) -> CheckpointRef:
        ref = parse_checkpoint_name(record.model, relative_name)
        if ref.relative_name not in record.checkpoints:
            raise not_found(f"checkpoint {ref}")
        return ref

    def _drop(self, record: ModelRecord, ref: CheckpointRef) -> None:
        del record.checkpoints[ref.relative_name]
        self.store.save_model(record)
        for model in self.store.models.values():
            if model.start is not None and model.start.path == str(ref) and not model.is_unsaved:
                # Its state now only exists in the workers.
                model.is_unsaved = True
                self.store.save_model(model)

    def _agree(self) -> None:
        """Add checkpoints that a dead process has saved; drop records of deleted ones."""
        stored = set(self.storage.list_checkpoints())
        for record in list(self.store.models.values()):
            recorded = {
                parse_checkpoint_name(record.model, relative_name)
                for relative_name in record.checkpoints
            }
            for ref in recorded - stored:
                self._drop(record, ref)
            for ref in sorted(ref for ref in stored - recorded if ref.model == record.model):
                record.checkpoints[ref.relative_name] = CheckpointRecord(
                    time=self.storage.folder(ref).stat().st_mtime,
                    size=self.storage.size(ref),
                    base_model=record.base_model,
                    lora=record.lora,
                )
                self.store.save_model(record)


def to_checkpoint_info(model: str, relative_name: str, checkpoint: CheckpointRecord) -> Checkpoint:
    """A checkpoint as reported to clients."""
    kind = "training" if relative_name.startswith("weights/") else "sampler"
    fields = common_fields(checkpoint, Checkpoint)
    return Checkpoint(name=relative_name, model=model, kind=kind, **fields)
