"""Follow a JSON Lines file while another process appends to it (tail -f)."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.train.metrics.jsonl import parse_line

LOOK_SECONDS = 0.5
"""Poll interval in seconds."""


def follow_lines(path: Path, ended: threading.Event) -> Iterator[dict[str, Any] | None]:
    """Yield each complete record in `path` as it appears; None if there is no more for now.

    Ends once `ended` is set and the rest has been read.
    """
    while not path.is_file():
        if ended.wait(LOOK_SECONDS):
            break
        yield None
    if not path.is_file():
        return
    with path.open("rb") as stream:
        begun, number = b"", 0
        while True:
            # Check before reading, so that everything written before the end is read.
            is_last = ended.is_set()
            for line in stream:
                begun += line
                if begun.endswith(b"\n"):
                    number += 1
                    yield parse_line(begun, path, number)
                    begun = b""
            if is_last:
                return
            yield None
            ended.wait(LOOK_SECONDS)
