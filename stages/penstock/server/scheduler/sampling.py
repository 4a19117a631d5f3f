"""Sampling: resolves the model to sample from, and batches requests for the same one."""

from penstock.server.protocol.requests import Sample
from penstock.server.protocol.results import Sampled
from penstock.server.protocol.worker_commands import Generate, Generated
from penstock.server.scheduler.checkpoint_catalog import Checkpoints
from penstock.server.scheduler.errors import RequestError, WorkersLostError
from penstock.server.scheduler.sessions import Sessions
from penstock.server.scheduler.storage import Storage
from penstock.server.scheduler.worker_client import Workers

Drawn = Sampled | RequestError
"""The outcome of one request."""


class Sampling:
    """Runs sampling requests."""

    def __init__(
        self, workers: Workers, storage: Storage, sessions: Sessions, checkpoints: Checkpoints
    ) -> None:
        self._workers = workers
        self._storage = storage
        self._sessions = sessions
        self._checkpoints = checkpoints

    def path(self, work: Sample, owner: str) -> str | None:
        """The checkpoint path to sample from; None: the base model. Raises RequestError."""
        if work.sampler is None:
            return work.path
        return self._sessions.sampler(work.sampler, owner).path

    def source(self, work: Sample, owner: str) -> str | None:
        """The folder to sample from; None: the base model. Raises RequestError."""
        path = self.path(work, owner)
        if path is None:
            return None
        spot, _ = self._checkpoints.read(path, owner)
        if spot.room != "sampler_weights":
            raise RequestError(
                "invalid",
                f"{spot} is what training goes on from; what is sampled from is"
                " <model>/sampler_weights/<name>",
            )
        return str(self._storage.folder(spot))

    async def draw(self, works: list[tuple[Sample, str]]) -> list[Drawn]:
        """The outcome of each request, batched where possible.

        Raises WorkersLostError. An error of one request does not affect the others in the batch.
        """
        ended: list[Drawn | None] = [None] * len(works)
        groups: dict[str | None, list[int]] = {}
        for index, (work, owner) in enumerate(works):
            try:
                groups.setdefault(self.source(work, owner), []).append(index)
            except RequestError as error:
                ended[index] = error
        for adapter, members in groups.items():
            found = await self._generate([works[index][0] for index in members], adapter)
            for index, drawn in zip(members, found, strict=True):
                ended[index] = drawn
        return [drawn for drawn in ended if drawn is not None]

    async def _generate(self, works: list[Sample], adapter: str | None) -> list[Drawn]:
        try:
            return await self._together(works, adapter)
        except WorkersLostError:
            raise
        except RequestError as error:
            if len(works) == 1:
                return [error]
        return [drawn for work in works for drawn in await self._generate([work], adapter)]

    async def _together(self, works: list[Sample], adapter: str | None) -> list[Drawn]:
        generated = await self._workers.command(
            Generate(
                prompts=tuple(work.prompt for work in works),
                counts=tuple(work.count for work in works),
                settings=tuple(work.sampling for work in works),
                adapter=adapter,
                prompt_logprobs=tuple(work.prompt_logprobs for work in works),
                topk=tuple(work.topk_prompt_logprobs for work in works),
                topk_drawn=tuple(work.topk_sample_logprobs for work in works),
            )
        )
        if not isinstance(generated, Generated) or len(generated.sampled) != len(works):
            raise RequestError("internal", "the workers answered a drawing with something else")
        return list(generated.sampled)
