"""Remote file streams: seekable, with range requests, read-ahead and retries.

Sequential reads get increasingly larger blocks, with the next block prefetched. Random access (a
Parquet reader) downloads little more than was requested. At most three blocks are in memory.
"""

import io
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import TYPE_CHECKING, Any

from penstock.core.process.retry import retry_until_connected
from penstock.core.remote.errors import StorageError, to_run_error
from penstock.core.remote.path import RemotePath

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

SMALLEST_BLOCK, FIRST_BLOCK, LARGEST_BLOCK = 64 << 10, 256 << 10, 8 << 20
"""Block sizes in bytes: on an unreliable connection, after a seek, and the maximum."""

GROWTH = 4


class RemoteStream(io.RawIOBase):
    """A seekable stream of a remote file. Raises StageError if it cannot be read."""

    def __init__(self, place: RemotePath, size: int) -> None:
        super().__init__()
        self._place = place
        self._size = size
        self._file: Any = retry_until_connected(self._open)
        self._offset = 0
        self._block = b""
        self._block_start = 0
        self._length = FIRST_BLOCK
        self._prefetched: tuple[int, Future[bytes]] | None = None
        self._fetcher: ThreadPoolExecutor | None = None

    def readable(self) -> bool:
        """It is for reading only."""
        return True

    def seekable(self) -> bool:
        """Any offset may be read next."""
        return True

    def tell(self) -> int:
        """The offset of the next byte that is read."""
        return self._offset

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the offset; nothing is downloaded until the next read."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"{base + offset} is before the start of the file")
        self._offset = base + offset
        return self._offset

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
        return len(available)

    def close(self) -> None:
        """Close the connection and drop prefetched blocks."""
        if not self.closed:
            if self._fetcher:
                self._fetcher.shutdown(wait=True, cancel_futures=True)
            self._block, self._prefetched = b"", None
            self._file.close()
        super().close()

    def _load_block(self, start: int, wanted: int) -> None:
        """Make the block that contains offset `start` the current block."""
        is_sequential = start == self._block_start + len(self._block)
        ahead = self._prefetched
        if ahead and ahead[0] == start:
            self._block = ahead[1].result()
        else:
            if not is_sequential:
                self._length = FIRST_BLOCK
            self._block = self._fetch_in_order(start, max(wanted, self._length))
        self._block_start, self._prefetched = start, None
        self._length = min(max(len(self._block) * GROWTH, FIRST_BLOCK), LARGEST_BLOCK)
        after = start + len(self._block)
        if is_sequential and after < self._size:
            self._prefetched = after, self._get_fetcher().submit(self._fetch, after, self._length)

    def _fetch_in_order(self, start: int, length: int) -> bytes:
        # One file object serves all reads, so once there is a thread, all reads go through it.
        if self._fetcher is None:
            return self._fetch(start, length)
        return self._get_fetcher().submit(self._fetch, start, length).result()

    def _get_fetcher(self) -> ThreadPoolExecutor:
        self._fetcher = self._fetcher or ThreadPoolExecutor(1, "penstock-read-ahead")
        return self._fetcher

    def _fetch(self, start: int, length: int) -> bytes:
        """Download `length` bytes from `start`, or to the end of the file, or fewer on an
        unreliable connection."""
        lengths = (max(min(length, SMALLEST_BLOCK), length // GROWTH**n) for n in count())

        def read() -> bytes:
            stop = min(start + next(lengths), self._size)
            self._file.seek(start)
            block: bytes = self._file.read(stop - start)
            if len(block) != stop - start:
                # The stream's state is unknown after an error; a new one starts at the same offset.
                self._file = self._open()
                raise ConnectionError(f"{len(block)} of {stop - start} bytes arrived")
            return block

        try:
            return retry_until_connected(read)
        except StorageError as fault:
            raise to_run_error(fault, self._place.url, "read") from None

    def _open(self) -> Any:
        return self._place.system.open(
            self._place.path, "rb", block_size=LARGEST_BLOCK, cache_type="none"
        )
