"""Follow a JSON Lines file while another process appends to it (`tail -F`)."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.core.file_tail import FileTail
from penstock.train.metrics.jsonl import parse_line

POLL_SECONDS = 0.5
"""Poll interval in seconds."""


def follow_lines(path: Path, stop: threading.Event) -> Iterator[dict[str, Any] | None]:
    """Yield each complete record in `path` as it appears; None if there is no more for now.

    Ends once `stop` is set and the rest has been read.
    """
    tail = FileTail(path)
    while True:
        # Check before reading, so that everything written before the end is read.
        is_last = stop.is_set()
        for line in tail.read_new_lines():
            yield parse_line(line, path, tail.num_lines)
        if is_last:
            return
        yield None
        stop.wait(POLL_SECONDS)
