"""metrics.jsonl: one object per record, each step once, whatever interrupted the run.

It is the one stream of what a run tells. Displays, trackers and the report follow it.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from penstock.core.errors import DamagedFileError
from penstock.core.files import atomic_write


class MetricsLog:
    """Appends records that carry a `step`; a resumed run first rewinds to where it starts again."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        kept = [record for record in read_metrics(path) if record["step"] <= resumed_step]
        with atomic_write(path) as part:
            part.write_text("".join(_line(record) for record in kept))
        self._file = os.open(path, os.O_WRONLY)
        self._end = os.lseek(self._file, 0, os.SEEK_END)
        self._waiting = b""
        self.fault: OSError | None = None
        """Why the last record is not in the file yet; None if it is."""

    def append(self, record: dict[str, Any]) -> None:
        """Hand one record to the system at once.

        A disk that is full stops nobody: the record waits in memory, and the next one brings it.
        """
        self._waiting += _line(record).encode()
        self._write()

    def close(self) -> None:
        """Close the file, with what could be written of it."""
        if self._waiting:
            self._write()
        os.close(self._file)

    def _write(self) -> None:
        """All that waits, or nothing of it: half a line would become half of the next one."""
        try:
            written = os.pwrite(self._file, self._waiting, self._end)
            if written < len(self._waiting):
                # What is left has not been tried yet: this says why it would not go.
                written += os.pwrite(self._file, self._waiting[written:], self._end + written)
        except OSError as error:
            self.fault = error
            os.ftruncate(self._file, self._end)
            return
        self._end += written
        self._waiting = self._waiting[written:]
        self.fault = None


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """All whole records in `path`; a last line that was cut short is not one.

    Raises DamagedFileError, with the line's number, for what is no JSON object.
    """
    if not path.is_file():
        return
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.endswith(b"\n"):
                yield parse_line(line, path, number)


def parse_line(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """The record in line `number` of `path`; see `read_metrics`."""
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise DamagedFileError(
            f"{path}, line {number}, is damaged: it is not a JSON object.\n"
            "  Restore the file, or delete that line."
        )
    return cast("dict[str, Any]", record)


def is_number(value: Any) -> bool:
    """Whether a value of a record is one number, which can be drawn and told to trackers."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"
