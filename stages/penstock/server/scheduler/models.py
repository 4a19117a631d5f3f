"""Models that are trained: which of them are open, and what would be lost with the workers."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.server.protocol.worker_commands import Opened
from penstock.server.scheduler.errors import RequestError, not_found
from penstock.server.scheduler.state_store import ModelRecord, Registry, Start


@dataclass
class LoadedModelState:
    """What is known of an open model beside its record, and goes with this process."""

    step: int = 0
    """How many its optimizer has made."""
    has_gradients: bool = False
    """Whether gradients were gathered since its last step."""
    lost_gradients: bool = False
    """Whether the gradients that its next step would take were lost."""


class Models:
    """All of them, by name."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._live: dict[str, LoadedModelState] = {}

    def find(self, model: str, owner: str) -> ModelRecord:
        """Raises RefusedError where it is not there, or is not the owner's."""
        record = self._registry.models.get(model)
        if record is None or record.owner != owner:
            raise not_found(f"model {model[:200]!r}")
        return record

    def find_open(self, model: str, owner: str) -> ModelRecord:
        """The same, and raises for one that was unloaded."""
        record = self.find(model, owner)
        if not record.is_open:
            path = f" Its last checkpoint is {record.start.path}." if record.start else ""
            raise RequestError(
                "gone", f"model {model} is not loaded: {record.closing}.{path}\n  Create it anew."
            )
        return record

    def known(self, model: str) -> ModelRecord | None:
        """Whoever's it is."""
        return self._registry.models.get(model)

    def is_open(self, model: str) -> bool:
        """Whether workers hold it, or are to."""
        record = self.known(model)
        return record is not None and record.is_open

    def open(self) -> list[ModelRecord]:
        """Those that workers hold or are to hold, the one that was asked of last first."""
        found = [record for record in self._registry.models.values() if record.is_open]
        return sorted(found, key=lambda record: -record.last_request)

    def live(self, record: ModelRecord) -> LoadedModelState:
        """What this process knows of it."""
        return self._live.setdefault(record.model, LoadedModelState(step=record.step))

    def found(self, record: ModelRecord, *, step: int, has_gradients: bool) -> None:
        """Workers that outlived an engine hold it like this."""
        self._live[record.model] = LoadedModelState(step, has_gradients)

    def of_owner(self, owner: str) -> list[ModelRecord]:
        """Those of an owner, the newest first."""
        found = [record for record in self._registry.models.values() if record.owner == owner]
        return sorted(found, key=lambda record: -record.created)

    def check_known(self, record: ModelRecord) -> None:
        """Raises RefusedError, once, where what a client knows of the model was lost."""
        if record.corrupted:
            record.corrupted = False
            self._registry.keep_model(record)
            raise RequestError(
                "lost",
                f"the workers were lost, and with them what model {record.model} had learned since"
                f" {_where(record)}, to which it was put back.\n  Go on from there.",
            )

    def check_gradients(self, record: ModelRecord) -> None:
        """Raises RefusedError where a step would take gradients that were lost."""
        if self.live(record).lost_gradients:
            raise RequestError(
                "lost",
                f"the gradients of this step were lost with the workers; model {record.model} was"
                f" put back to {_where(record)}.\n  Send their passes again.",
            )

    @contextmanager
    def changing(self, record: ModelRecord) -> Generator[None]:
        """Workers change it meanwhile. Whoever dies before the end, it is put back; who asked for
        the change hears of that by its failure."""
        self._registry.begin(record.model)
        try:
            yield
        except RequestError as error:
            # Of what was refused nothing was done. After other failures nobody knows.
            if error.code not in ("lost", "internal"):
                self._registry.end()
            raise
        if not record.is_unsaved:
            record.is_unsaved = True
            self._registry.keep_model(record)
        self._registry.end()

    def goes_on_from(self, record: ModelRecord, start: Start | None, *, step: int) -> None:
        """It is as it is at `start` (None: as it was made), gathered gradients apart."""
        record.start, record.step = start, step
        record.is_unsaved = self.live(record).has_gradients
        record.last_request = time.time()
        self._registry.keep_model(record)

    def opened(self, record: ModelRecord, instance: str, sizes: Opened) -> None:
        """Workers hold it, without gradients."""
        record.is_open, record.instance, record.closing = True, instance, ""
        record.state_bytes, record.export_bytes = sizes.state_bytes, sizes.export_bytes
        self._live[record.model] = LoadedModelState(record.step)
        self._registry.keep_model(record)

    def put_back(
        self,
        record: ModelRecord,
        instance: str,
        sizes: Opened,
        *,
        was_changing: bool,
    ) -> None:
        """Workers hold it again, as it is at its start. `was_changing`: when the others died."""
        record.corrupted = record.corrupted or record.is_unsaved
        record.is_unsaved = False
        self.opened(record, instance, sizes)
        self._live[record.model].lost_gradients = record.corrupted or was_changing

    def closed(self, record: ModelRecord, why: str) -> None:
        """Workers do not hold it, and are not to."""
        record.is_open, record.is_unsaved, record.corrupted = False, False, False
        record.closing = why
        self._live.pop(record.model, None)
        self._registry.keep_model(record)


def _where(record: ModelRecord) -> str:
    at = record.start.path if record.start else "its beginning"
    return f"step {record.step} ({at})"
