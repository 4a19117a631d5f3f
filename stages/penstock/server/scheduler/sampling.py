"""Sampling: resolves the model to sample from, and batches requests for the same one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from penstock.server.protocol.requests import Sample
from penstock.server.protocol.results import SampleResult
from penstock.server.protocol.worker_commands import GenerateCommand, GenerateResult
from penstock.server.scheduler.checkpoint_catalog import CheckpointCatalog
from penstock.server.scheduler.errors import RequestError, WorkersLostError
from penstock.server.scheduler.queue import Outcome, Task
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

    async def sample(self, tasks: list[Task]) -> list[Outcome]:
        """The outcome of each task, batched where possible. Raises WorkersLostError. An error of
        one task does not affect the others in the batch."""
        outcomes: dict[int, Outcome] = {}
        groups: dict[str | None, list[int]] = {}
        for index, task in enumerate(tasks):
            try:
                self.check(task)
                groups.setdefault(self._resolve_folder(task), []).append(index)
            except RequestError as error:
                outcomes[index] = error
        for adapter, members in groups.items():
            samples = [cast(Sample, tasks[index].operation) for index in members]
            outcomes.update(zip(members, await self._generate(samples, adapter), strict=True))
        return [outcomes[index] for index in range(len(tasks))]

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

    async def _generate(
        self, samples: list[Sample], adapter: str | None
    ) -> list[SampleResult | RequestError]:
        command = GenerateCommand(samples=tuple(samples), adapter=adapter)
        try:
            return list((await self.workers.run(command, GenerateResult)).results)
        except WorkersLostError:
            raise
        except RequestError as error:
            if len(samples) == 1:
                return [error]
        return [
            outcome for sample in samples for outcome in await self._generate([sample], adapter)
        ]
