"""Warnings of processes that prepare slices, logged once each by the process that started them.

Only there do they reach the handlers that were set up for them, such as Prefect's of a task.
"""

import logging
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger("penstock.prepare")


@dataclass(frozen=True)
class ProcessWarnings:
    """What a process has warned of."""

    process: str
    """A name that no other process has."""
    messages: Sequence[str]


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message not in self.messages:
            self.messages.append(message)


@contextmanager
def collect_warnings() -> Generator[list[str]]:
    """Yield a list that gets, once each, what is logged while the block runs as a warning or worse,
    and what the module `warnings` would show."""
    collector, root = _Collector(), logging.getLogger()
    logging.captureWarnings(capture=True)
    root.addHandler(collector)
    try:
        yield collector.messages
    finally:
        root.removeHandler(collector)
        logging.captureWarnings(capture=False)


def log_process_warnings(found: Iterable[ProcessWarnings]) -> None:
    """Log each warning once, with the number of processes that it is of, if of several."""
    processes: dict[str, set[str]] = defaultdict(set)
    for each in found:
        for message in each.messages:
            processes[message].add(each.process)
    for message, of in processes.items():
        log.warning("%s", message if len(of) == 1 else f"{message} (in {len(of)} processes)")
