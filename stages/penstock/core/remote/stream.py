"""Remote file streams: seekable, with range requests, read-ahead and retries.

Sequential reads get increasingly larger blocks, with the next block prefetched. Random access (a
Parquet reader) downloads little more than was requested. At most three blocks are in memory. What
arrived before a lost connection is kept.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import TYPE_CHECKING

from penstock.core.process.retry import retry_until_connected
from penstock.core.remote.answers import LEAST_PROGRESS
from penstock.core.remote.errors import StorageError, classify_error, to_run_error
from penstock.core.remote.path import Info, RemotePath
from penstock.core.remote.ranges import open_ranges
from penstock.core.remote.seekable import SeekableRawIO

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

SMALLEST_BLOCK, FIRST_BLOCK, LARGEST_BLOCK = 4 << 10, 256 << 10, 8 << 20
"""Block sizes in bytes: on an unreliable connection, after a seek, and the maximum."""

GROWTH = 4


class RemoteStream(SeekableRawIO):
    """A seekable stream of one version of a remote file. Raises StageError if it cannot be read, or
    has another version than the one that `info` describes."""

    def __init__(self, path: RemotePath, info: Info) -> None:
        super().__init__()
        self._path = path
        self._size: int = info["size"]
        self._ranges = open_ranges(path, info)
        self._is_verified = True
        self._block = b""
        self._block_start = 0
        self._length = FIRST_BLOCK
        self._prefetched: tuple[int, Future[bytes]] | None = None
        self._fetcher: ThreadPoolExecutor | None = None

    @property
    def size(self) -> int:
        return self._size

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        """Fill `buffer` with available bytes, at least one unless the file has ended."""
        view = memoryview(buffer).cast("B")
        if self._offset >= self._size or not len(view):
            return 0
        if not self._block_start <= self._offset < self._block_start + len(self._block):
            self._load_block(self._offset, len(view))
        start = self._offset - self._block_start
        available = memoryview(self._block)[start : start + len(view)]
        view[: len(available)] = available
        self._offset += len(available)
        if self._offset == self._size:
            self._verify()
        return len(available)

    def close(self) -> None:
        """Drop prefetched blocks; verify what was read since the last verification."""
        if self.closed:
            return
        if self._fetcher:
            self._fetcher.shutdown(wait=True, cancel_futures=True)
        self._block, self._prefetched = b"", None
        super().close()
        self._verify()

    def _load_block(self, start: int, num_bytes: int) -> None:
        is_sequential = start == self._block_start + len(self._block)
        ahead = self._prefetched
        if ahead and ahead[0] == start:
            self._block = ahead[1].result()
        else:
            # After a seek, read little: a Parquet reader goes from footer to column chunk to column
            # chunk.
            if not is_sequential:
                self._length = FIRST_BLOCK
            length = max(num_bytes, self._length)
            # One file object serves all reads, so once there is a thread, all reads go through it.
            if self._fetcher is None:
                self._block = self._fetch(start, length)
            else:
                self._block = self._fetcher.submit(self._fetch, start, length).result()
        self._block_start, self._prefetched = start, None
        self._length = min(max(len(self._block) * GROWTH, FIRST_BLOCK), LARGEST_BLOCK)
        after = start + len(self._block)
        if is_sequential and after < self._size:
            self._fetcher = self._fetcher or ThreadPoolExecutor(1, "penstock-read-ahead")
            self._prefetched = after, self._fetcher.submit(self._fetch, after, self._length)

    def _fetch(self, start: int, length: int) -> bytes:
        """Download `length` bytes from `start`, or to the end of the file, or fewer on an
        unreliable connection."""
        # Each try asks for a quarter: a connection that is cut every few seconds ends no long
        # range.
        lengths = (max(min(length, SMALLEST_BLOCK), length // GROWTH**n) for n in count())
        block = bytearray()

        def read() -> None:
            before = len(block)
            stop = min(start + before + next(lengths), start + length, self._size)
            try:
                self._ranges.read(start + before, stop, block.extend)
            except Exception as error:
                # What arrived is proved: the block ends there, and the next try is a first one.
                if len(block) - before < LEAST_PROGRESS or classify_error(error) != "cut":
                    raise

        self._is_verified = False
        self._run(read)
        return bytes(block)

    def _verify(self) -> None:
        if not self._is_verified:
            self._run(self._ranges.verify)
            self._is_verified = True

    def _run(self, call: Callable[[], None]) -> None:
        try:
            retry_until_connected(call)
        except StorageError as fault:
            # After an error there is nothing to verify: its reader has no data.
            self._is_verified = True
            raise to_run_error(fault, self._path.url, "read") from None
