"""Collect warnings of worker processes and log each once in the parent process.

Log handlers, such as that of a Prefect task, exist in the parent process only.
"""

import logging
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger("penstock.prepare")


@dataclass(frozen=True)
class ProcessWarnings:
    """Warnings of one process."""

    process: str
    """Unique name of the process."""
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
    """Yield a list that collects messages logged at WARNING or above during the block, and those of
    the module `warnings`, without duplicates."""
    collector, root = _Collector(), logging.getLogger()
    # Python writes warnings to the stderr of a worker, past all handlers of loggers.
    logging.captureWarnings(capture=True)
    # Of the root logger: transformers and tokenizers warn by loggers of their own.
    root.addHandler(collector)
    try:
        yield collector.messages
    finally:
        root.removeHandler(collector)
        logging.captureWarnings(capture=False)


def log_process_warnings(batches: Iterable[ProcessWarnings]) -> None:
    """Log each warning once, with the number of processes if several raised it."""
    processes: dict[str, set[str]] = defaultdict(set)
    for batch in batches:
        for message in batch.messages:
            processes[message].add(batch.process)
    for message, of in processes.items():
        log.warning("%s", message if len(of) == 1 else f"{message} (in {len(of)} processes)")
