"""Models: which ones are loaded in the workers, and what would be lost with the workers."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.server.protocol.worker_commands import CheckpointSizes
from penstock.server.scheduler.errors import RequestError, not_found
from penstock.server.scheduler.state_store import ModelRecord, ResumePoint, StateStore


@dataclass
class LoadedModelState:
    """In-memory state of a loaded model, besides its record."""

    step: int = 0  # Number of optimizer steps
    has_gradients: bool = False
    lost_gradients: bool = False  # Whether the accumulated gradients of the next step were lost


class Models:
    """All models by name."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._states: dict[str, LoadedModelState] = {}

    def find(self, model: str, owner: str) -> ModelRecord:
        """The owner's model. Raises RequestError if it does not exist or is another owner's."""
        record = self._store.models.get(model)
        if record is None or record.owner != owner:
            raise not_found(f"model {model[:200]!r}")
        return record

    def find_open(self, model: str, owner: str) -> ModelRecord:
        """The same, and raises RequestError if it is unloaded."""
        record = self.find(model, owner)
        if not record.is_open:
            path = f" Its last checkpoint is {record.start.path}." if record.start else ""
            raise RequestError(
                "gone", f"model {model} is not loaded: {record.closing}.{path}\n  Create it again."
            )
        return record

    def get(self, model: str) -> ModelRecord | None:
        """The model of any owner."""
        return self._store.models.get(model)

    def is_open(self, model: str) -> bool:
        """Whether it is or will be loaded in the workers."""
        record = self.get(model)
        return record is not None and record.is_open

    def open(self) -> list[ModelRecord]:
        """Models that are or will be loaded, most recently requested first."""
        records = [record for record in self._store.models.values() if record.is_open]
        return sorted(records, key=lambda record: -record.last_request)

    def get_state(self, record: ModelRecord) -> LoadedModelState:
        return self._states.setdefault(record.model, LoadedModelState(step=record.step))

    def adopt(self, record: ModelRecord, *, step: int, has_gradients: bool) -> None:
        """Restore the state of a model in workers that outlived the previous scheduler."""
        self._states[record.model] = LoadedModelState(step, has_gradients)

    def list_for_owner(self, owner: str) -> list[ModelRecord]:
        """The owner's models, newest first."""
        records = [record for record in self._store.models.values() if record.owner == owner]
        return sorted(records, key=lambda record: -record.created)

    def check_not_corrupted(self, record: ModelRecord) -> None:
        """Raises RequestError, once, if state that the client has seen was lost."""
        if record.corrupted:
            record.corrupted = False
            self._store.save_model(record)
            raise RequestError(
                "lost",
                f"the workers were lost, and with them the training of model {record.model} since"
                f" {_describe_position(record)}; it was restored from there.\n  Continue from it.",
            )

    def check_gradients(self, record: ModelRecord) -> None:
        """Raises RequestError if a step would use lost gradients."""
        if self.get_state(record).lost_gradients:
            raise RequestError(
                "lost",
                f"the gradients of this step were lost with the workers; model {record.model} was"
                f" restored from {_describe_position(record)}.\n  Send their passes again.",
            )

    @contextmanager
    def modifying(self, record: ModelRecord) -> Generator[None]:
        """Context manager for a change by the workers. If they die, the model is restored; the
        client learns that from the error of its request."""
        self._store.begin(record.model)
        try:
            yield
        except RequestError as error:
            # A rejected request changed nothing. After other errors the state is unknown.
            if error.code not in ("lost", "internal"):
                self._store.end()
            raise
        if not record.is_unsaved:
            record.is_unsaved = True
            self._store.save_model(record)
        self._store.end()

    def set_resume_point(
        self, record: ModelRecord, start: ResumePoint | None, *, step: int
    ) -> None:
        """Its state is now that of `start` (None: initial), except for accumulated gradients."""
        record.start, record.step = start, step
        record.is_unsaved = self.get_state(record).has_gradients
        record.last_request = time.time()
        self._store.save_model(record)

    def mark_loaded(self, record: ModelRecord, instance: str, sizes: CheckpointSizes) -> None:
        """The workers have loaded it, without gradients."""
        record.is_open, record.instance, record.closing = True, instance, ""
        record.state_bytes, record.export_bytes = sizes.state_bytes, sizes.export_bytes
        self._states[record.model] = LoadedModelState(record.step)
        self._store.save_model(record)

    def mark_restored(
        self, record: ModelRecord, instance: str, sizes: CheckpointSizes, *, was_changing: bool
    ) -> None:
        """The workers have restored it. `was_changing`: when the previous workers died."""
        record.corrupted = record.corrupted or record.is_unsaved
        record.is_unsaved = False
        self.mark_loaded(record, instance, sizes)
        self._states[record.model].lost_gradients = record.corrupted or was_changing

    def mark_unloaded(self, record: ModelRecord, why: str) -> None:
        """It is unloaded and will not be restored."""
        record.is_open, record.is_unsaved, record.corrupted = False, False, False
        record.closing = why
        self._states.pop(record.model, None)
        self._store.save_model(record)


def _describe_position(record: ModelRecord) -> str:
    position = record.start.path if record.start else "its beginning"
    return f"step {record.step} ({position})"
