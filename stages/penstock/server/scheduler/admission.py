"""Admission control: whether a request may enter the queue (ownership, validity, limits)."""

import math
from collections.abc import Callable

from penstock.server.protocol.envelopes import Request
from penstock.server.protocol.requests import CreateModel, Ordered, Pass, Sample
from penstock.server.protocol.results import ModelMade, Served
from penstock.server.scheduler.checkpoint_names import model_name
from penstock.server.scheduler.errors import RequestError
from penstock.server.scheduler.models import Models
from penstock.server.scheduler.pack_rows import check_lengths
from penstock.server.scheduler.queue import Outcome, Queue, Task
from penstock.server.scheduler.sessions import Sessions, check_metadata, check_number
from penstock.server.scheduler.settings import EngineSettings
from penstock.server.scheduler.validate_request import check, check_base


class Admission:
    """Admission checks of the queue."""

    def __init__(
        self,
        queue: Queue,
        sessions: Sessions,
        models: Models,
        served: Callable[[], Served | None],
        base_names: Callable[[], list[str]],
        settings: EngineSettings,
    ) -> None:
        """`served`: information about the workers; None while unknown."""
        self._queue = queue
        self._sessions = sessions
        self._models = models
        self._served = served
        self._base_names = base_names
        self._settings = settings
        self._coming: dict[str, Task] = {}
        """Models that are being created."""
        self.untouched: dict[str, CreateModel] = {}
        """Models that received no request since their creation."""

    def put(self, ask: Request, work: Ordered | Sample) -> Outcome | None:
        """Admit a request; returns its outcome if it already has one. Raises RequestError."""
        if isinstance(work, Sample):
            errand = Task(work, ask.owner, None, asks=[ask.id])
            self.check(errand)
            self._touch_sampler(work, ask.owner)
            self._queue.put(errand)
            return None
        if isinstance(work, CreateModel):
            return self._create(ask, work)
        session = self._session_of(work.model, ask.owner)
        self._sessions.touch(session)
        self.untouched.pop(work.model, None)
        return self._in_order(ask, work)

    def check(self, errand: Task) -> None:
        """Validate a request, unless already done. If the workers' limits were unknown on arrival,
        it is validated again later. Raises RequestError."""
        work = errand.work
        if errand.is_checked:
            return
        if isinstance(work, Pass):
            # Shapes are validated next.
            lengths = (math.prod(datum.tokens.shape) for datum in work.data)
            check_lengths(lengths, self._settings.sample_packing_sequence_len)
        served = self._served()
        if served is None:
            return
        check(work, served)
        if isinstance(work, CreateModel):
            check_base(work.base_model, self._base_names())
        errand.is_checked = True

    def ended(self, errand: Task) -> None:
        """The request has ended in any way."""
        work = errand.work
        if isinstance(work, CreateModel):
            self._coming.pop(work.model, None)
            if self._models.is_open(work.model) and not self._queue.pending(work.model):
                self.untouched[work.model] = work
        if errand.model is None:
            return
        record = self._models.known(errand.model)
        if record is None or not record.is_open:
            self.untouched.pop(errand.model, None)
            self._queue.forget(errand.model)
        elif not errand.is_ours:
            # A session does not expire because a request takes long.
            self._sessions.touch(record.session)

    def _in_order(self, ask: Request, work: Ordered) -> Outcome | None:
        errand = Task(work, ask.owner, work.model, ask.seq, [ask.id])
        if ask.seq is None:
            self.check(errand)
            self._queue.put(errand)
            return None
        # A known sequence number may already have an outcome; otherwise it is used up, whatever the
        # request is.
        found = self._queue.put(errand)
        if not isinstance(found, Task):
            return found
        if found is errand:
            try:
                self.check(errand)
            except RequestError as error:
                self._queue.refuse(errand, error)
                return error
        return None

    def _create(self, ask: Request, work: CreateModel) -> Outcome | None:
        model_name(work.model)
        coming = self._coming.get(work.model)
        if coming is not None and coming.owner == ask.owner and coming.work == work:
            coming.asks.append(ask.id)
            return None
        self._sessions.find(work.session, ask.owner)
        self._sessions.touch(work.session)
        if self._is_there(work, ask.owner):
            return ModelMade(model=work.model)
        errand = Task(work, ask.owner, work.model, None, [ask.id])
        self.check(errand)
        check_metadata((), work.user_metadata)
        self._check_room(work, ask.owner)
        if self._queue.pending(work.model):
            raise RequestError(
                "busy", f"works of the model that was called {work.model} are still to end"
            )
        self._queue.restart_sequence(work.model)
        self._queue.put(errand)
        self._coming[work.model] = errand
        return None

    def _is_there(self, work: CreateModel, owner: str) -> bool:
        """Whether this very model exists and has received no request. Raises RequestError if
        another owner has the name."""
        record = self._models.known(work.model)
        taken = record is not None and (record.owner != owner or record.is_open)
        if not taken and work.model not in self._coming:
            return False
        is_same = self.untouched.get(work.model) == work
        if record is not None and record.owner == owner and record.is_open and is_same:
            return True
        raise RequestError(
            "exists",
            f"there is a model {work.model}.\n  Unload it, or choose another name.",
        )

    def _check_room(self, work: CreateModel, owner: str) -> None:
        """Raises RequestError if no further model may be created. With full fine-tuning there is
        one model."""
        coming = {model: errand.owner for model, errand in self._coming.items()}
        owners = list((coming | {each.model: each.owner for each in self._models.open()}).values())
        served, settings = self._served(), self._settings
        if owners and served is not None and served.trains == "all weights":
            raise RequestError(
                "busy",
                f"all weights are trained here, of one model at a time, and there is one.\n"
                f"  Have it unloaded before {work.model} is created.",
            )
        check_number("max_models", settings.max_models, len(owners), "models are open")
        check_number(
            "max_owner_models",
            settings.max_owner_models,
            owners.count(owner),
            "models of yours are open",
        )

    def _session_of(self, model: str, owner: str) -> str:
        coming = self._coming.get(model)
        if coming is not None and coming.owner == owner and isinstance(coming.work, CreateModel):
            return coming.work.session
        return self._models.find_open(model, owner).session

    def _touch_sampler(self, work: Sample, owner: str) -> None:
        if work.sampler is not None:
            self._sessions.sampler(work.sampler, owner)
            self._sessions.touch_sampler(work.sampler)
