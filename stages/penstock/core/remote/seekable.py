"""The offset of a raw stream that is read at any place."""

import io
from abc import abstractmethod


class SeekableRawIO(io.RawIOBase):
    """A stream for reading; a subclass has `readinto`, which moves `_offset` on."""

    def __init__(self) -> None:
        super().__init__()
        self._offset = 0

    @property
    @abstractmethod
    def size(self) -> int:
        """Length of the file in bytes."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset}.get(whence)
        base = self.size if base is None else base
        if base + offset < 0:
            raise ValueError(f"{base + offset} is before the start of the file")
        self._offset = base + offset
        return self._offset
