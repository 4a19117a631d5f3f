"""Futures: works that clients come back for. Each is its owner's, and is kept for a while only."""

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from penstock.server.api.link import End, Link
from penstock.server.api.refusals import Refusal
from penstock.server.protocol.asks import Answer, Ask, Failure
from penstock.server.protocol.results import Passed, Sampled
from penstock.server.protocol.values import Array
from penstock.server.protocol.works import Ordered, Pass, Sample

Kind = Literal[
    "create_model",
    "unload_model",
    "forward",
    "forward_backward",
    "optim_step",
    "abort_gradient_epoch",
    "save_weights",
    "load_weights",
    "save_weights_for_sampler",
    "sample",
]
"""What a client asked for, as results name it."""

MAX_KEPT = 100_000
"""Futures that are done and kept, of all owners."""

SWEEP_SECONDS = 10.0
"""Between looks at what has been kept for long enough."""


@dataclass(frozen=True)
class Shape:
    """What of the request its result is written with."""

    kind: Kind
    model: str | None = None
    path: str | None = None
    last_prompt_logprobs: int | None = None
    """Of how many tokens of the prompt log-probabilities are told; None: of all."""


@dataclass
class Promise:
    """One future."""

    id: str
    owner: str
    shape: Shape
    end: asyncio.Future[End]
    again: tuple[str, str, str] | None
    """Owner, call and idempotency key of the request that made it."""
    done_at: float | None = None
    size: int = field(default=0)
    """Bytes that its result takes."""


class Futures:
    """All that are kept."""

    def __init__(
        self,
        link: Link,
        *,
        ttl: float,
        max_pending: int,
        max_kept_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ttl` in seconds from when a result is there; `max_pending` of one owner."""
        self._link = link
        self._ttl, self._max_pending, self._max_kept_bytes = ttl, max_pending, max_kept_bytes
        self._clock = clock
        self._promises: dict[str, Promise] = {}
        self._again: dict[tuple[str, str, str], str] = {}
        self._done: dict[str, None] = {}
        self._pending: Counter[str] = Counter()
        self._kept_bytes = 0
        self._sweeper: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._promises)

    @property
    def pending(self) -> int:
        """Those that are not done."""
        return self._pending.total()

    def start(self) -> None:
        """Forget what has been kept for long enough, until `stop`."""
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Forget nothing more."""
        if self._sweeper:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper

    async def submit(
        self,
        owner: str,
        work: Ordered | Sample,
        shape: Shape,
        *,
        seq: int | None = None,
        idempotency: str = "",
    ) -> Promise:
        """Hand a work over, or find the future of the same request that came before.

        `idempotency`: the client's name for this request, the same when it sends it again. Raises
        Refusal: 429 when the owner waits for as many as it may, 503 when no workers will come any
        more, else those of `Link.ask`.
        """
        again = (owner, shape.kind, idempotency) if idempotency else None
        known = self._promises.get(self._again.get(again, "")) if again else None
        if known and not _has_failed(known.end):
            return known
        status = self._link.status
        if status and status.workers == "failed":
            raise Refusal(
                f"the workers are not started again: {status.reason}",
                code="unavailable",
                category="server",
                retry_after=60.0,
            )
        if self._pending[owner] >= self._max_pending:
            raise Refusal(
                f"{self._max_pending} of your requests are not done yet; wait for some of them",
                code="busy",
                retry_after=1.0,
            )
        name = f"future_{secrets.token_hex(16)}"
        promise = Promise(name, owner, shape, self._link.expect(name), again)
        # Known and counted before anything is waited for: many may come at once, and the same one.
        self._pending[owner] += 1
        self._promises[name] = promise
        if again:
            self._again[again] = name
        promise.end.add_done_callback(lambda _: self._finish(promise))
        await self._link.send(Ask(id=name, owner=owner, work=work, seq=seq))
        return promise

    def find(self, name: str, owner: str) -> Promise:
        """The owner's future of this name. Raises Refusal (410) where there is none: it is too
        old, another's, or of an API process that ended."""
        promise = self._promises.get(name)
        if promise is None or promise.owner != owner:
            raise Refusal(
                f"{name[:100]!r} is no future of yours that is still kept; ask again for what it"
                " was to bring",
                code="gone",
            )
        return promise

    async def pass_over(self, owner: str, model: str, seq: int) -> None:
        """Tell the engine that the work of this number is none: it was refused here.

        Works wait for those numbered before them, so a number that never comes would hold up the
        rest. An empty pass takes its place, which the engine refuses in its turn.
        """
        nothing = Pass(model=model, data=(), loss="cross_entropy", forward_only=True)
        with contextlib.suppress(Refusal):
            await self._link.ask(Ask(id=secrets.token_hex(16), owner=owner, work=nothing, seq=seq))

    async def cancel(self, name: str, owner: str) -> None:
        """Ask that the work is not begun. Raises Refusal as `find`."""
        promise = self.find(name, owner)
        if not promise.end.done():
            await self._link.cancel(promise.id)

    def _finish(self, promise: Promise) -> None:
        self._release(promise.owner)
        if promise.end.cancelled():
            self._forget(promise)
            return
        promise.done_at = self._clock()
        promise.size = _bytes_of(promise.end.result())
        self._kept_bytes += promise.size
        self._done[promise.id] = None
        while (self._kept_bytes > self._max_kept_bytes or len(self._done) > MAX_KEPT) and len(
            self._done
        ) > 1:
            self._forget(self._promises[next(iter(self._done))])

    def _release(self, owner: str) -> None:
        self._pending[owner] -= 1
        if not self._pending[owner]:
            del self._pending[owner]

    def expire(self) -> None:
        """Forget results that have been there for their time."""
        oldest = self._clock() - self._ttl
        while self._done:
            promise = self._promises[next(iter(self._done))]
            if promise.done_at is None or promise.done_at > oldest:
                return
            self._forget(promise)

    def _forget(self, promise: Promise) -> None:
        self._promises.pop(promise.id, None)
        if promise.id in self._done:
            del self._done[promise.id]
            self._kept_bytes -= promise.size
        if promise.again and self._again.get(promise.again) == promise.id:
            del self._again[promise.again]

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_SECONDS, self._ttl))
            self.expire()


def _has_failed(end: asyncio.Future[End]) -> bool:
    """Whether it may be tried again."""
    return end.done() and (end.cancelled() or isinstance(end.result(), Failure))


def _bytes_of(end: End) -> int:
    """What a result takes, near enough."""
    if isinstance(end, Failure):
        return len(end.error)
    assert isinstance(end, Answer)
    match end.result:
        case Passed(outputs=outputs):
            return sum(len(array.data) for output in outputs for array in output.values())
        case Sampled() as sampled:
            told = [sampled, *sampled.sequences]
            arrays = (getattr(one, name) for one in told for name in one.__struct_fields__)
            return sum(len(array.data) for array in arrays if isinstance(array, Array))
        case _:
            return 0
