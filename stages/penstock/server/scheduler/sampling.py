"""Sampling: resolves the model to sample from, and batches requests for the same one."""

from penstock.server.protocol.requests import Sample
from penstock.server.protocol.results import SampleResult
from penstock.server.protocol.worker_commands import GenerateCommand, GenerateResult
from penstock.server.scheduler.checkpoint_catalog import CheckpointCatalog
from penstock.server.scheduler.errors import RequestError, WorkersLostError
from penstock.server.scheduler.sessions import Sessions
from penstock.server.scheduler.storage import Storage
from penstock.server.scheduler.worker_client import WorkerClient

SampleOutcome = SampleResult | RequestError
"""The outcome of one request."""


class SamplingRequests:
    """Runs sampling requests."""

    def __init__(
        self,
        workers: WorkerClient,
        storage: Storage,
        sessions: Sessions,
        checkpoints: CheckpointCatalog,
    ) -> None:
        self._workers = workers
        self._storage = storage
        self._sessions = sessions
        self._checkpoints = checkpoints

    def resolve_path(self, operation: Sample, owner: str) -> str | None:
        """The checkpoint path to sample from; None: the base model. Raises RequestError."""
        if operation.sampler is None:
            return operation.path
        return self._sessions.sampler(operation.sampler, owner).path

    def resolve_folder(self, operation: Sample, owner: str) -> str | None:
        """The folder to sample from; None: the base model. Raises RequestError."""
        path = self.resolve_path(operation, owner)
        if path is None:
            return None
        ref, _ = self._checkpoints.read(path, owner)
        if ref.subfolder != "sampler_weights":
            raise RequestError(
                "invalid",
                f"{ref} is for resuming training; sample from <model>/sampler_weights/<name>",
            )
        return str(self._storage.folder(ref))

    async def sample(self, operations: list[tuple[Sample, str]]) -> list[SampleOutcome]:
        """The outcome of each request, batched where possible.

        Raises WorkersLostError. An error of one request does not affect the others in the batch.
        """
        ended: list[SampleOutcome | None] = [None] * len(operations)
        groups: dict[str | None, list[int]] = {}
        for index, (operation, owner) in enumerate(operations):
            try:
                groups.setdefault(self.resolve_folder(operation, owner), []).append(index)
            except RequestError as error:
                ended[index] = error
        for adapter, members in groups.items():
            samples = await self._generate([operations[index][0] for index in members], adapter)
            for index, drawn in zip(members, samples, strict=True):
                ended[index] = drawn
        return [drawn for drawn in ended if drawn is not None]

    async def _generate(self, operations: list[Sample], adapter: str | None) -> list[SampleOutcome]:
        try:
            return await self._sample_batch(operations, adapter)
        except WorkersLostError:
            raise
        except RequestError as error:
            if len(operations) == 1:
                return [error]
        return [
            drawn
            for operation in operations
            for drawn in await self._generate([operation], adapter)
        ]

    async def _sample_batch(
        self, operations: list[Sample], adapter: str | None
    ) -> list[SampleOutcome]:
        generated = await self._workers.run(
            GenerateCommand(
                prompts=tuple(operation.prompt for operation in operations),
                counts=tuple(operation.count for operation in operations),
                settings=tuple(operation.sampling for operation in operations),
                adapter=adapter,
                prompt_logprobs=tuple(operation.prompt_logprobs for operation in operations),
                topk_prompt_logprobs=tuple(
                    operation.topk_prompt_logprobs for operation in operations
                ),
                topk_sample_logprobs=tuple(
                    operation.topk_sample_logprobs for operation in operations
                ),
                images=tuple(operation.images for operation in operations),
            )
        )
        if not isinstance(generated, GenerateResult) or len(generated.results) != len(operations):
            raise RequestError(
                "internal", "the workers returned another result for a sampling request"
            )
        return list(generated.results)
