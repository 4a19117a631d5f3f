"""Sampling: resolves the model to sample from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from penstock.server.protocol.requests import Sample
from penstock.server.protocol.results import SampleResult
from penstock.server.protocol.worker_commands import GenerateCommand, GenerateResult
from penstock.server.scheduler.checkpoint_catalog import CheckpointCatalog
from penstock.server.scheduler.errors import RequestError
from penstock.server.scheduler.queue import Task
from penstock.server.scheduler.sessions import Sessions
from penstock.server.scheduler.worker_client import WorkerClient


@dataclass(frozen=True)
class SamplingRequests:
    """Runs sampling requests."""

    workers: WorkerClient
    sessions: Sessions
    checkpoints: CheckpointCatalog
    check: Callable[[Task], None]  # Raises RequestError for an invalid request

    def resolve_path(self, task: Task) -> str | None:
        """The checkpoint path to sample from; None: the base model. Raises RequestError."""
        operation = cast(Sample, task.operation)
        if operation.sampler is None:
            return operation.path
        return self.sessions.sampler(operation.sampler, task.owner).path

    def is_from(self, path: str | None, task: Task) -> bool:
        try:
            return self.resolve_path(task) == path
        except RequestError:
            return False

    async def sample(self, task: Task) -> SampleResult:
        """Run a request. Those of one path may run at the same time: the workers generate for all
        of them together. Raises RequestError or WorkersLostError."""
        self.check(task)
        command = GenerateCommand(
            samples=(cast(Sample, task.operation),), adapter=self._resolve_folder(task)
        )
        [result] = (await self.workers.run(command, GenerateResult)).results
        return result

    def _resolve_folder(self, task: Task) -> str | None:
        """The folder to sample from; None: the base model. Raises RequestError."""
        path = self.resolve_path(task)
        if path is None:
            return None
        ref, _ = self.checkpoints.read(path, task.owner)
        if ref.subfolder != "sampler_weights":
            raise RequestError(
                "invalid",
                f"{ref} is for resuming training; sample from <model>/sampler_weights/<name>",
            )
        return str(self.checkpoints.folder(ref))
