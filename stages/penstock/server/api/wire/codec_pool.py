"""Codec process pool: decodes large bodies and encodes large results outside the event loop.

A small body may take much work to decode. Each process has a memory limit and a time limit; one
that exceeds them is killed, and its request is rejected. Each owner has one job at a time, and
owners take turns.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import msgspec
import numpy as np

from penstock.core import env
from penstock.server.api.errors import ApiError
from penstock.server.api.wire.request_bodies import BodyError, BodyJob, DecodedBody, to_decode_error
from penstock.server.api.wire.response_bodies import ResultJob
from penstock.server.protocol.results import Result

LOG = logging.getLogger(__name__)

PROCESSES = 2
# Timeout in seconds for the start of a process, which on a busy machine may take long.
START_SECONDS = 300.0
JOB_SECONDS = 60.0
"""Timeout in seconds for one job in a process that has started; bodies within the limits of
`request_bodies` take a few seconds."""
BASE_MEMORY = 1 << 30
"""Memory limit of a process in bytes, in addition to twice the maximum body size."""
IMAGE_MEMORY = 2 << 30
"""Where images are processed: their processor, and one image of `media.decode.MAX_PIXELS`."""
# Bytes per read from a process: 128 MB take half a millisecond each, during which the event loop is
# blocked; with chunks of a megabyte they take seven.
CHUNK_BYTES = 1 << 16
NICENESS = 10  # Nice value of the processes from their start on, so that heartbeats are not delayed
MAX_NICENESS = 19
LENGTH = 8  # Bytes of the length prefix of each part
READY = b"R"  # What a process writes once it is ready for its first job


CodecJob = BodyJob | ResultJob


class CodecReply(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a job, followed by its payload: a request in msgpack, or an encoded result."""

    decoded: DecodedBody | None = None
    error: BodyError | None = None


class CodecPool:
    """All codec processes. They are started on demand."""

    def __init__(self, max_request_bytes: int, image_processor: str = "") -> None:
        """`image_processor`: the folder of the model's; empty: samples have no images."""
        self._memory = BASE_MEMORY + 2 * max_request_bytes
        self._image_processor = image_processor
        if image_processor:
            self._memory += IMAGE_MEMORY
        self._idle: list[_Codec] = []
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._busy: set[str] = set()  # Owners with a job in progress
        self.jobs = 0

    async def start(self) -> None:
        """Start one process before the first large body."""
        async with self._use_process():
            pass

    async def stop(self) -> None:
        for process in self._idle:
            await process.end()
        self._idle.clear()

    @asynccontextmanager
    async def decoding(
        self, owner: str, job: BodyJob, parts: Sequence[bytes]
    ) -> AsyncGenerator[tuple[CodecReply, memoryview]]:
        """Decode a body, or return the error; and its encoded request. No other body of the owner
        is decoded until that has been sent. Raises ApiError: 413 if it exceeds the memory or time
        limit, 503 if no process starts."""
        async with self._acquire_slot(owner):
            yield await self._run(job, parts)

    async def write(self, owner: str, job: ResultJob, result: Result) -> bytes:
        """Encode a result. Raises ApiError as above."""
        async with self._acquire_slot(owner):
            # Encoded only now, so that queued results of one owner hold no extra copies.
            encoded = msgspec.msgpack.encode(result)
            reply, written = await self._run(job, (encoded,))
        if reply.error is not None:
            raise to_decode_error(reply.error)
        return bytes(written)

    async def _run(self, job: CodecJob, parts: Sequence[bytes]) -> tuple[CodecReply, memoryview]:
        async with self._use_process() as process:
            self.jobs += 1
            return await process.run(job, parts)

    @asynccontextmanager
    async def _acquire_slot(self, owner: str) -> AsyncGenerator[None]:
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(slot)
        self._start_jobs()
        try:
            # Without the shield a cancelled wait cancels the slot, which then counts as taken.
            await asyncio.shield(slot)
            yield
        finally:
            if slot.done():
                self._busy.discard(owner)
                self._start_jobs()
            else:
                # It was cancelled while it waited.
                self._waiting[owner].remove(slot)
                if not self._waiting[owner]:
                    del self._waiting[owner]

    def _start_jobs(self) -> None:
        """Start jobs of owners that have none, while there are free processes."""
        for owner in list(self._waiting):
            if len(self._busy) >= PROCESSES:
                return
            if owner in self._busy:
                continue
            slot = self._waiting[owner].popleft()
            if self._waiting[owner]:
                self._waiting.move_to_end(owner)
            else:
                del self._waiting[owner]
            self._busy.add(owner)
            slot.set_result(None)

    async def _start(self) -> "_Codec":
        limits = (str(os.getpid()), str(self._memory))
        if not self._image_processor:
            return await _Codec.start("penstock.server.api.wire.codec_process", *limits)
        # Not imported here: it imports transformers.
        module = "penstock.server.images.codec_process"
        return await _Codec.start(module, *limits, self._image_processor)

    @asynccontextmanager
    async def _use_process(self) -> AsyncGenerator["_Codec"]:
        """A free process for one job. It is killed if the job was not completed."""
        process = self._idle.pop() if self._idle else await self._start()
        is_done = False
        try:
            yield process
            is_done = True
        finally:
            if is_done and process.is_alive:
                self._idle.append(process)
            else:
                await process.end()


class _Codec:
    """One codec process (`codec_process`)."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._is_ready = False

    @classmethod
    async def start(cls, module: str, *arguments: str) -> "_Codec":
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=CHUNK_BYTES,
            env=env.child_environment(
                # With -m, Python imports modules from the current folder before its own, unless
                # PYTHONSAFEPATH.
                {"PYTHONSAFEPATH": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            ),
        )
        niceness = os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, process.pid, min(niceness, MAX_NICENESS))
        return cls(process)

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def run(self, job: CodecJob, parts: Sequence[bytes]) -> tuple[CodecReply, memoryview]:
        """Run a job, once the process has started. Raises ApiError: 413 if the job exceeds its
        limits, 503 if the process does not start."""
        await self._wait_until_ready()
        try:
            async with asyncio.timeout(JOB_SECONDS):
                await self._write_job(job, parts)
                reply = msgspec.msgpack.decode(await self._read_part(), type=CodecReply)
                return reply, await self._read_part()
        except TimeoutError:
            raise _limit_exceeded(f"{JOB_SECONDS:g} s") from None
        except (asyncio.IncompleteReadError, BrokenPipeError, ConnectionResetError):
            LOG.warning("a process that decoded a body, or encoded a result, has died")
            raise _limit_exceeded("the memory that there is for one") from None

    async def _wait_until_ready(self) -> None:
        if self._is_ready:
            return
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._process.stdout.readexactly(len(READY))
        except (TimeoutError, asyncio.IncompleteReadError):
            LOG.warning("a process that decodes bodies and encodes results has not started")
            raise ApiError(
                "the server could not start a process for this request; try again",
                code="unavailable",
            ) from None
        self._is_ready = True

    async def end(self) -> None:
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def _write_job(self, job: CodecJob, parts: Sequence[bytes]) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        header = msgspec.msgpack.encode(job)
        stdin.write(len(header).to_bytes(LENGTH, "little") + header)
        stdin.write(sum(map(len, parts)).to_bytes(LENGTH, "little"))
        for part in parts:
            # Part by part: asyncio copies what the pipe does not take at once.
            stdin.write(part)
            await stdin.drain()

    async def _read_part(self) -> memoryview:
        stdout = self._process.stdout
        assert stdout is not None
        length = int.from_bytes(await stdout.readexactly(LENGTH), "little")
        # np.empty allocates pages when they are written, not at once.
        part = np.empty(length, np.uint8).data
        filled = 0
        while filled < length:
            piece = await stdout.read(min(CHUNK_BYTES, length - filled))
            if not piece:
                raise asyncio.IncompleteReadError(b"", length)
            part[filled : filled + len(piece)] = piece
            filled += len(piece)
        return part


def _limit_exceeded(limit: str) -> ApiError:
    return ApiError(f"the samples take more than {limit} to decode; send less at once", status=413)
