"""Metrics recorder: writes metrics.jsonl, and starts the progress display, trackers and live
report.

The display runs in this process. Trackers and the live report are separate processes that read the
file. None of them can stop or slow down the run.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

from penstock.core.os_errors import describe_os_error
from penstock.train.launch.job import LOGS, METRICS, Job
from penstock.train.metrics.jsonl import MetricsLog
from penstock.train.metrics.progress import build_progress
from penstock.train.trackers.registry import TITLES, select_trackers
from penstock.train.trackers.supervisor import TrackerSupervisor
from penstock.train.trackers.tracker import Ending

POLL_SECONDS = 1.0
"""Seconds between checks that these processes are alive."""

log = logging.getLogger("penstock.train")


class MetricsRecorder:
    """Used by rank 0. Must be closed, so that the other processes can finish."""

    def __init__(self, job: Job, *, done: int, total: int) -> None:
        """Resume after `done` of `total` steps; records of later steps are removed."""
        train = job.config.train
        self._job = job
        self.ending: Ending = "stopped"
        """The run outcome passed to these processes at the end."""
        self._metrics = MetricsLog(job.output_dir / METRICS, done)
        self._display = build_progress(train.log_format, total, done, train.log_interval)
        self._trackers = TrackerSupervisor(self.log_message)
        self._last_poll = time.monotonic()
        self._report_after = (
            self._last_poll + train.report_interval if train.report_interval else None
        )
        self._has_unwritten = False
        names, notes = select_trackers(train)
        for note in notes:
            self.log_message(note)
        for name in names:
            self._start_process(TITLES.get(name, name), "penstock.train.trackers", name)

    def log(self, record: Mapping[str, Any]) -> None:
        """Write a step record, with its `loss`, or an evaluation record."""
        self._append(record)
        self._display.show(record)
        now = time.monotonic()
        if now - self._last_poll >= POLL_SECONDS:
            self._last_poll = now
            self._trackers.poll()
            self._start_live_report(now)

    def warn(self, step: int, text: str, **details: Any) -> None:
        """Log a warning at step `step` (from 1); `details` are stored for the report."""
        self._append({"step": step, "warning": text, **details})
        self.log_message(f"step {step}: {text}")

    def log_message(self, line: str) -> None:
        log.warning(line)
        self._display.say(f"train: {line}")

    def close(self) -> None:
        """No more records. The other processes get limited time to finish."""
        # First, so that what trackers say at their end is below the finished bar.
        self._display.close()
        # Before trackers are told of the end: they then read the file to its last line, and exit.
        self._metrics.close()
        self._trackers.close(self.ending)

    def _append(self, record: Mapping[str, Any]) -> None:
        self._metrics.append({**record, "time": round(time.time(), 3)})
        fault = self._metrics.fault
        if fault and not self._has_unwritten:
            self.log_message(
                f"metrics.jsonl: {describe_os_error(fault)}. Training continues; records are "
                "buffered until they can be written"
            )
        self._has_unwritten = fault is not None

    def _start_live_report(self, now: float) -> None:
        """Start the live report once the run has lasted long enough to justify a process."""
        if self._report_after is None or now < self._report_after:
            return
        self._report_after = None
        every = f"{self._job.config.train.report_interval:g}"
        self._start_process("the report", "penstock.train.report", every)

    def _start_process(self, title: str, module: str, argument: str) -> None:
        folder = self._job.output_dir
        file = folder / LOGS / f"{module.rpartition('.')[2]}_{argument}.log"
        self._trackers.start(title, [module, argument, str(folder)], file)
