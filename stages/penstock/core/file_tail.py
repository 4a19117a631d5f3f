"""Read the lines that other processes append to a file (`tail -F`)."""

import os
from collections.abc import Iterator
from pathlib import Path


class FileTail:
    """Complete lines appended to a file. A file that is replaced or truncated is read from its
    start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_id: tuple[int, bytes] | None = None
        self._offset = 0
        self.num_lines = 0
        """Lines of the present file that were yielded."""

    def read_new_lines(self) -> Iterator[bytes]:
        """Complete lines that earlier calls did not yield; none if the file does not exist."""
        try:
            stream = self._path.open("rb")
        except OSError:
            return
        with stream:
            # Of what is open: the name may lead to another file by now.
            stat = os.fstat(stream.fileno())
            # The inode number alone is not enough: the next file may reuse that of a deleted one.
            file_id = stat.st_ino, stream.readline()
            if file_id != self._file_id or stat.st_size < self._offset:
                self._file_id, self._offset, self.num_lines = file_id, 0, 0
            stream.seek(self._offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self.num_lines += 1
                yield line
