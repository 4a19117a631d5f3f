"""metrics.jsonl: one object per logged step, each step once, whatever interrupted the run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.core.files import publishing


class MetricsLog:
    """Appends records that carry a `step`; a resumed run first rewinds to where it starts again."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        kept = [record for record in read_metrics(path) if record["step"] <= resumed_step]
        with publishing(path) as part:
            part.write_text("".join(_line(record) for record in kept))
        self._stream = path.open("a")

    def append(self, record: dict[str, Any]) -> None:
        """Write one record and hand it to the system at once."""
        self._stream.write(_line(record))
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """All whole records in `path`; a last line that was cut short is not one."""
    if not path.is_file():
        return
    with path.open() as stream:
        for line in stream:
            if line.endswith("\n"):
                yield json.loads(line)


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"
