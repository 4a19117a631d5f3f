"""Warnings of processes that prepare slices, logged once each by the process that started them.

Only there do they reach the handlers that were set up for them, such as Prefect's of a task.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

log = logging.getLogger("penstock.prepare")


@dataclass(frozen=True)
class ProcessWarnings:
    """What a process has warned of since it was last asked."""

    pid: int
    messages: Sequence[str]


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


_collector = _Collector()


def collect_warnings() -> None:
    """Collect what is logged in this process from now on as a warning or worse, and what the module
    `warnings` would show, instead of writing it to its standard error."""
    logging.captureWarnings(capture=True)
    logging.getLogger().addHandler(_collector)


def take_warnings() -> ProcessWarnings:
    """What was collected since the last call, once each."""
    messages, _collector.messages = _collector.messages, []
    return ProcessWarnings(os.getpid(), tuple(dict.fromkeys(messages)))


def log_process_warnings(found: Iterable[ProcessWarnings]) -> None:
    """Log each warning once, with the number of processes that it is of, if of several."""
    processes: dict[str, set[int]] = defaultdict(set)
    for each in found:
        for message in each.messages:
            processes[message].add(each.pid)
    for message, pids in processes.items():
        log.warning("%s", message if len(pids) == 1 else f"{message} (in {len(pids)} processes)")
