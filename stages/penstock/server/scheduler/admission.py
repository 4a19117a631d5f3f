"""Admission control: whether a request may enter the queue (ownership, validity, limits)."""

import math
from dataclasses import dataclass, field
from typing import cast

from penstock.server.protocol.envelopes import Request
from penstock.server.protocol.requests import CreateModel, ForwardBackward, ModelOperation, Sample
from penstock.server.protocol.results import CreateModelResult
from penstock.server.scheduler.checkpoint_names import model_name
from penstock.server.scheduler.errors import RequestError
from penstock.server.scheduler.models import Models
from penstock.server.scheduler.pack_rows import check_lengths
from penstock.server.scheduler.queue import Outcome, RequestQueue, Task
from penstock.server.scheduler.sessions import Sessions, check_limit, check_metadata
from penstock.server.scheduler.settings import SchedulerSettings
from penstock.server.scheduler.validate_request import check, check_base
from penstock.server.scheduler.worker_client import WorkerClient


@dataclass
class Admission:
    """Admission checks of the queue."""

    queue: RequestQueue
    sessions: Sessions
    models: Models
    workers: WorkerClient
    settings: SchedulerSettings
    _being_created: dict[str, Task] = field(default_factory=dict[str, Task])
    untouched: dict[str, CreateModel] = field(default_factory=dict[str, CreateModel])
    """Models that received no request since their creation."""

    def admit(self, request: Request, operation: ModelOperation | Sample) -> Outcome | None:
        """Admit a request; returns its outcome if it already has one. Raises RequestError."""
        if self.workers.state == "failed":
            raise RequestError("unavailable", self.workers.reason)
        if isinstance(operation, Sample):
            task = Task(operation, request.owner, None, request_ids=[request.id])
            self.check(task)
            if operation.sampler is not None:
                self.sessions.sampler(operation.sampler, request.owner)
                self.sessions.touch_sampler(operation.sampler)
            self.queue.put(task)
            return None
        if isinstance(operation, CreateModel):
            return self._create(request, operation)
        creating = self._being_created.get(operation.model)
        if creating and creating.owner == request.owner:
            session = cast(CreateModel, creating.operation).session
        else:
            session = self.models.find_open(operation.model, request.owner).session
        self.sessions.touch(session)
        self.untouched.pop(operation.model, None)
        return self._queue_in_order(request, operation)

    def check(self, task: Task) -> None:
        """Validate a request, unless already done. If the workers' limits were unknown on arrival,
        it is validated again later. Raises RequestError."""
        operation = task.operation
        if task.is_checked:
            return
        if isinstance(operation, ForwardBackward):
            # Shapes are validated next.
            lengths = (math.prod(datum.tokens.shape) for datum in operation.data)
            check_lengths(lengths, self.settings.sample_packing_sequence_len)
        if self.workers.last is None:
            return
        check(operation, self.workers.served)
        if isinstance(operation, CreateModel):
            check_base(operation.base_model, self.workers.base_names)
        task.is_checked = True

    def on_task_end(self, task: Task) -> None:
        operation = task.operation
        if isinstance(operation, CreateModel):
            self._being_created.pop(operation.model, None)
            if self.models.is_open(operation.model) and not self.queue.pending(operation.model):
                self.untouched[operation.model] = operation
        if task.model is None:
            return
        record = self.models.get(task.model)
        if record is None or not record.is_open:
            self.untouched.pop(task.model, None)
            self.queue.forget(task.model)
        elif not task.is_internal:
            # A session does not expire because a request takes long.
            self.sessions.touch(record.session)

    def _queue_in_order(self, request: Request, operation: ModelOperation) -> Outcome | None:
        task = Task(operation, request.owner, operation.model, request.seq, [request.id])
        if request.seq is None:
            self.check(task)
            self.queue.put(task)
            return None
        # A known sequence number may already have an outcome; otherwise it is used up, whatever the
        # request is.
        queued = self.queue.put(task)
        if not isinstance(queued, Task):
            return queued
        if queued is task:
            try:
                self.check(task)
            except RequestError as error:
                self.queue.reject(task, error)
                return error
        return None

    def _create(self, request: Request, operation: CreateModel) -> Outcome | None:
        model_name(operation.model)
        creating = self._being_created.get(operation.model)
        if creating and creating.owner == request.owner and creating.operation == operation:
            # A client that missed the response asks again.
            creating.request_ids.append(request.id)
            return None
        self.sessions.find(operation.session, request.owner)
        self.sessions.touch(operation.session)
        if self._exists(operation, request.owner):
            return CreateModelResult(model=operation.model)
        task = Task(operation, request.owner, operation.model, None, [request.id])
        self.check(task)
        check_metadata((), operation.user_metadata)
        self._check_model_limits(operation, request.owner)
        if self.queue.pending(operation.model):
            raise RequestError(
                "busy", f"requests of an earlier model {operation.model} have not ended yet"
            )
        # Its requests are numbered from 1, also after an unloaded model of the same name.
        self.queue.restart_sequence(operation.model)
        self.queue.put(task)
        self._being_created[operation.model] = task
        return None

    def _exists(self, operation: CreateModel, owner: str) -> bool:
        """Whether this very model exists, untouched. Raises RequestError if the name is taken."""
        record = self.models.get(operation.model)
        name_is_taken = record is not None and (record.owner != owner or record.is_open)
        if not name_is_taken and operation.model not in self._being_created:
            return False
        is_same = self.untouched.get(operation.model) == operation
        if record is not None and record.owner == owner and record.is_open and is_same:
            return True
        raise RequestError(
            "exists", f"there is a model {operation.model}.\n  Unload it, or choose another name."
        )

    def _check_model_limits(self, operation: CreateModel, owner: str) -> None:
        """Raises RequestError if no further model may be created; of all weights there is one."""
        creating = {model: task.owner for model, task in self._being_created.items()}
        opened = {model.model: model.owner for model in self.models.open()}
        owners = list((creating | opened).values())
        ready, settings = self.workers.last, self.settings
        if owners and ready is not None and ready.served.trains == "all weights":
            raise RequestError(
                "busy",
                f"all weights are trained here, of one model at a time, and one is loaded.\n"
                f"  Unload it before {operation.model} is created.",
            )
        check_limit("max_models", settings.max_models, len(owners), "models are open")
        own, limit = owners.count(owner), settings.max_owner_models
        check_limit("max_owner_models", limit, own, "models of yours are open")
