"""Futures: requests whose results clients poll for. Each belongs to an owner and expires."""

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from penstock.server.api.errors import ApiError
from penstock.server.api.scheduler_client import AnyResponse, SchedulerClient
from penstock.server.protocol.codec import Encoded
from penstock.server.protocol.envelopes import Failure, Request, Response
from penstock.server.protocol.requests import ForwardBackward, ModelOperation, Sample
from penstock.server.protocol.results import ForwardBackwardResult, SampleResult
from penstock.server.protocol.types import Array

RequestKind = Literal[
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
"""The request type, as results name it."""

MAX_KEPT = 100_000  # Maximum number of completed futures, over all owners
MAX_PENDING_BYTES, MAX_OWNER_PENDING_BYTES = 1 << 30, 256 << 20
"""Of pending requests, over all owners and per owner; the scheduler holds them in memory."""

SWEEP_SECONDS = 10.0


@dataclass(frozen=True)
class EncodedRequest:
    """A request that a codec process has already encoded."""

    id: str  # The id of its request and its future
    frame: Encoded


@dataclass(frozen=True)
class ResultFormat:
    """Fields of the request that determine the format of its result."""

    kind: RequestKind
    model: str | None = None
    path: str | None = None
    last_prompt_logprobs: int | None = None
    """Number of prompt tokens whose logprobs are returned; None: all."""


@dataclass
class FutureRecord:
    """One future."""

    id: str
    owner: str
    result_format: ResultFormat
    response: asyncio.Future[AnyResponse]
    retry_key: tuple[str, str, str] | None  # Owner, call and idempotency key of the request
    done_at: float | None = None
    result_size: int = 0  # Bytes of its result's arrays
    size: int = 0  # Bytes held for it: its result, and its encoded result
    request_size: int = 0
    payloads: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """The encoded result by format, cached on first request if it is large."""
    encode_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a result is encoded."""


def new_future() -> str:
    """A random, unguessable name."""
    return f"future_{secrets.token_hex(16)}"


class Futures:
    """All futures."""

    def __init__(
        self, scheduler: SchedulerClient, *, ttl: float, max_pending: int, max_result_bytes: int
    ) -> None:
        """`ttl` in seconds after completion; `max_pending` per owner."""
        self._scheduler = scheduler
        self._ttl, self._max_pending, self._max_result_bytes = ttl, max_pending, max_result_bytes
        self._futures: dict[str, FutureRecord] = {}
        self._by_retry_key: dict[tuple[str, str, str], str] = {}
        self._done: dict[str, dict[str, None]] = {}  # Completed futures by owner, oldest first
        self._pending: Counter[str] = Counter()
        self._pending_bytes: Counter[str] = Counter()
        self._result_bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._futures)

    @property
    def pending(self) -> int:
        return self._pending.total()

    async def sweep_periodically(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_SECONDS, self._ttl))
            self.expire()

    async def submit(
        self,
        owner: str,
        operation: ModelOperation | Sample | EncodedRequest,
        result_format: ResultFormat,
        *,
        seq: int | None = None,
        idempotency: str = "",
    ) -> FutureRecord:
        """Submit a request, or return the future of an earlier identical request.

        `idempotency` is the client's idempotency key, the same for a repeated request. Raises
        ApiError: 429 if the owner has the maximum number of pending requests, 503 if the workers
        have failed permanently, and the errors of `SchedulerClient.submit`.
        """
        retry_key = (owner, result_format.kind, idempotency) if idempotency else None
        earlier = self._futures.get(self._by_retry_key.get(retry_key, "")) if retry_key else None
        if earlier and not _is_retryable(earlier.response):
            return earlier
        status = self._scheduler.status
        if status and status.workers == "failed":
            raise ApiError(
                f"the workers are not restarted: {status.reason}",
                code="unavailable",
                retry_after=60.0,
            )
        if self._pending[owner] >= self._max_pending:
            raise ApiError(
                f"{self._max_pending} of your requests are not done yet; wait for some of them",
                code="busy",
            )
        size = _request_num_bytes(operation)
        if (
            self._pending_bytes[owner] + size > MAX_OWNER_PENDING_BYTES
            or self._pending_bytes.total() + size > MAX_PENDING_BYTES
        ):
            raise ApiError(
                f"{self._pending_bytes[owner]} bytes of your requests are not done yet, and this"
                f" one has {size}; wait for some of them",
                code="busy",
            )
        name = operation.id if isinstance(operation, EncodedRequest) else new_future()
        future = FutureRecord(
            name, owner, result_format, self._scheduler.expect(name), retry_key, request_size=size
        )
        # Register and count before the first await: requests, also identical ones, may arrive
        # concurrently.
        self._pending[owner] += 1
        self._pending_bytes[owner] += size
        self._futures[name] = future
        if retry_key:
            self._by_retry_key[retry_key] = name
        future.response.add_done_callback(lambda _: self._finish(future))
        if isinstance(operation, EncodedRequest):
            await self._scheduler.send(operation.frame, name)
        else:
            await self._scheduler.send(
                Request(id=name, owner=owner, operation=operation, seq=seq), name
            )
        return future

    def find(self, name: str, owner: str) -> FutureRecord:
        """The owner's future of this name. Raises ApiError (410) if there is none: it has expired,
        belongs to another owner, or was lost in a restart of the API process."""
        future = self._futures.get(name)
        if future is None or future.owner != owner:
            raise ApiError(
                f"{name[:100]!r} is no stored future of yours; send its request again", code="gone"
            )
        return future

    async def skip_sequence_number(self, owner: str, model: str, seq: int) -> None:
        """Tell the scheduler to skip this sequence number: its request was rejected here. Requests
        wait for those with lower numbers, so a missing number would block the following ones. An
        empty forward pass takes its place, which the scheduler rejects."""
        nothing = ForwardBackward(model=model, data=(), loss="cross_entropy", forward_only=True)
        with contextlib.suppress(ApiError):
            await self._scheduler.submit(
                Request(id=secrets.token_hex(16), owner=owner, operation=nothing, seq=seq)
            )

    async def cancel(self, name: str, owner: str) -> None:
        """Request that it is not started. Raises ApiError as `find`."""
        future = self.find(name, owner)
        if not future.response.done():
            await self._scheduler.cancel(future.id)

    def cache_payload(self, future: FutureRecord, form: str, payload: bytes) -> None:
        if future.id in self._done.get(future.owner, {}):
            future.payloads[form] = payload
            future.size += len(payload)
            self._result_bytes[future.owner] += len(payload)
            self._evict_over_limit(future)

    def _finish(self, future: FutureRecord) -> None:
        for counter, count in ((self._pending, 1), (self._pending_bytes, future.request_size)):
            counter[future.owner] -= count
            # A Counter keeps keys at 0: it would grow with every owner that there ever was.
            if not counter[future.owner]:
                del counter[future.owner]
        if future.response.cancelled():
            self._forget(future)
            return
        future.done_at = time.monotonic()
        future.size = future.result_size = _result_num_bytes(future.response.result())
        self._result_bytes[future.owner] += future.size
        self._done.setdefault(future.owner, {})[future.id] = None
        self._evict_over_limit(future)

    def _evict_over_limit(self, newest: FutureRecord) -> None:
        """Drop the oldest results of the owner with the most, until the total is within the limit,
        so that one owner's results do not evict those of others."""
        while self._result_bytes.total() > self._max_result_bytes:
            [(owner, _)] = self._result_bytes.most_common(1)
            if not self._evict_oldest(owner, newest):
                return
        while sum(map(len, self._done.values())) > MAX_KEPT:
            owner = max(self._done, key=lambda owner_name: len(self._done[owner_name]))
            if not self._evict_oldest(owner, newest):
                return

    def _evict_oldest(self, owner: str, newest: FutureRecord) -> bool:
        oldest = self._futures[next(iter(self._done[owner]))]
        if oldest is newest:
            return False
        self._forget(oldest)
        return True

    def expire(self) -> None:
        oldest = time.monotonic() - self._ttl
        for owner in list(self._done):
            while owner in self._done:
                future = self._futures[next(iter(self._done[owner]))]
                if future.done_at is None or future.done_at > oldest:
                    break
                self._forget(future)

    def _forget(self, future: FutureRecord) -> None:
        self._futures.pop(future.id, None)
        own = self._done.get(future.owner, {})
        if future.id in own:
            del own[future.id]
            self._result_bytes[future.owner] -= future.size
            if not own:
                del self._done[future.owner]
                del self._result_bytes[future.owner]
        if future.retry_key and self._by_retry_key.get(future.retry_key) == future.id:
            del self._by_retry_key[future.retry_key]


def _is_retryable(end: asyncio.Future[AnyResponse]) -> bool:
    return end.done() and (end.cancelled() or isinstance(end.result(), Failure))


def _request_num_bytes(operation: ModelOperation | Sample | EncodedRequest) -> int:
    """Approximate bytes of a request."""
    match operation:
        case EncodedRequest():
            return len(operation.frame.frame)
        case ForwardBackward(data=data):
            arrays = (array for datum in data for array in (datum.tokens, *datum.inputs.values()))
            return sum(len(array.data) for array in arrays)
        case Sample(prompt=prompt):
            return len(prompt.data)
        case _:
            return 0


def _result_num_bytes(end: AnyResponse) -> int:
    """Approximate bytes of a result."""
    if isinstance(end, Failure):
        return len(end.error)
    assert isinstance(end, Response)
    match end.result:
        case ForwardBackwardResult(outputs=outputs):
            return sum(len(array.data) for output in outputs for array in output.values())
        case SampleResult() as sampled:
            structs = [sampled, *sampled.sequences]
            arrays = (
                getattr(struct, name) for struct in structs for name in struct.__struct_fields__
            )
            return sum(len(array.data) for array in arrays if isinstance(array, Array))
        case _:
            return 0
