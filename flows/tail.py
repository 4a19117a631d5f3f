"""Tail growing files: read from where the last read ended."""

import json
import os
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

LOGGED = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ([A-Z]+) (.*)", re.S)
"""A line of a rank's log: when, how important, what."""


class Tail:
    """Complete lines appended to a file. A file that is rewritten is read from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, bytes] | None = None
        self._read = 0

    def more(self) -> Iterator[bytes]:
        """Lines that were not given before."""
        try:
            stream = self._path.open("rb")
        except OSError:
            return
        with stream:
            now = os.fstat(stream.fileno())
            # The first line too: a file that is deleted leaves its number to the next one.
            file = now.st_ino, stream.readline()
            if file != self._file or now.st_size < self._read:
                self._file, self._read = file, 0
            stream.seek(self._read)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self._read += len(line)
                yield line


class Records:
    """Records of a metrics.jsonl that were told at some time or later."""

    def __init__(self, path: Path, *, since: float) -> None:
        self._tail, self._since = Tail(path), since

    def more(self) -> Iterator[dict[str, Any]]:
        """Those that were not given before."""
        for line in self._tail.more():
            record = json.loads(line)
            if record["time"] >= self._since:
                yield record


class LoggedLines:
    """What a rank's log gained since some time: the level and the text of each entry."""

    def __init__(self, path: Path, *, since: float) -> None:
        self._tail, self._since = Tail(path), since

    def more(self) -> Iterator[tuple[str, str]]:
        """Entries that were not given before."""
        entries: list[str] = []
        for line in self._tail.more():
            text = line.decode("utf-8", "replace")
            if LOGGED.match(text) or not entries:
                entries.append(text)
            else:
                entries[-1] += text
        for entry in entries:
            if found := LOGGED.match(entry):
                second, thousandths, level, text = found.groups()
                # Local time, as `logging` writes it.
                time = datetime.fromisoformat(second).timestamp() + int(thousandths) / 1000
                if time >= self._since:
                    yield level, text.rstrip("\n")
