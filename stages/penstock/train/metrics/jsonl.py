"""metrics.jsonl: one JSON object per record, each step once, also after interruptions.

All metrics of a run go to this file. Progress displays, trackers and the report read it.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from penstock.core.errors import DamagedFileError
from penstock.core.files import atomic_write


class MetricsLog:
    """Appends records with a `step`. A resumed run first truncates the file to its start step."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        earlier = [record for record in read_metrics(path) if record["step"] <= resumed_step]
        with atomic_write(path) as part:
            part.write_text("".join(map(_line, earlier)), encoding="utf-8")
        # Not with O_APPEND: Linux's pwrite(2) then appends, whatever offset it is given.
        self._file = os.open(path, os.O_WRONLY)
        self._end = os.lseek(self._file, 0, os.SEEK_END)
        self._buffer = b""
        self.fault: OSError | None = None
        """Why the last record is not yet in the file; None if it is."""

    def append(self, record: dict[str, Any]) -> None:
        """Write one record immediately.

        A full disk does not stop the run: the record is buffered and written with the next one.
        """
        self._buffer += _line(record).encode()
        self._write()

    def close(self) -> None:
        """Close the file, with the records that could be written."""
        if self._buffer:
            self._write()
        os.close(self._file)

    def _write(self) -> None:
        """Write the whole buffer or nothing: a partial line would corrupt the next record."""
        try:
            written = os.pwrite(self._file, self._buffer, self._end)
            if written < len(self._buffer):
                # Retry the rest: the next call returns the reason for a partial write.
                written += os.pwrite(self._file, self._buffer[written:], self._end + written)
        except OSError as error:
            self.fault = error
            os.ftruncate(self._file, self._end)
            return
        self._end += written
        self._buffer = self._buffer[written:]
        self.fault = None


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """All complete records in `path`; a truncated last line is skipped.

    Raises DamagedFileError with the line number for a line that is not a JSON object.
    """
    if not path.is_file():
        return
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.endswith(b"\n"):
                yield parse_line(line, path, number)


def parse_line(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """Parse line `number` of `path`; see `read_metrics`."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise DamagedFileError(
            f"{path}, line {number}, is damaged: it is not a JSON object.\n"
            "  Restore the file, or delete that line."
        )
    return cast("dict[str, Any]", record)


def is_number(value: Any) -> bool:
    """Whether a value of a record is a scalar that can be plotted and sent to trackers."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"
