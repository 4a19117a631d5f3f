"""The one place where a run's records go: to metrics.jsonl, and from there to all who follow it.

A display shows them in this process. Trackers and the page that is written again while training
runs are processes of their own, which read the file. Nothing here stops or holds up a run.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

from penstock.core.os_errors import describe_os_error
from penstock.train.launch.job import LOGS, METRICS, Job
from penstock.train.metrics.jsonl import MetricsLog
from penstock.train.metrics.progress import progress
from penstock.train.trackers.registry import KNOWN, wanted
from penstock.train.trackers.supervisor import TrackerSupervisor
from penstock.train.trackers.tracker import Ending

LOOK_SECONDS = 1.0
"""How often it is looked whether those who follow are still there."""

log = logging.getLogger("penstock.train")


class MetricsRecorder:
    """The leading rank's. Close it: it lets those who follow finish."""

    def __init__(self, job: Job, *, done: int, total: int) -> None:
        """Go on behind `done` steps of a run of `total`; what was told of later ones is undone."""
        train = job.config.train
        self._job = job
        self.ending: Ending = "stopped"
        """What those who follow are told at the end."""
        self._metrics = MetricsLog(job.output_dir / METRICS, done)
        self._display = progress(train.log_format, total, done, train.log_interval)
        self._couriers = TrackerSupervisor(self.say)
        self._looked = time.monotonic()
        self._report_after = self._looked + train.report_interval if train.report_interval else None
        self._is_behind = False
        names, notes = wanted(train)
        for note in notes:
            self.say(note)
        for name in names:
            self._start(KNOWN[name].title, "penstock.train.trackers", name)

    def tell(self, record: Mapping[str, Any]) -> None:
        """A record: of a step, with its `loss`, or of an evaluation."""
        self._keep({**record, "time": round(time.time(), 3)})
        self._display.show(record)
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._couriers.look()
            self._follow_with_a_page(now)

    def warn(self, step: int, text: str, **details: Any) -> None:
        """Something that people should look at, in the step with this number, from 1; `details` are
        kept with it for the report."""
        self._keep({"step": step, "warning": text, **details, "time": round(time.time(), 3)})
        self.say(f"step {step}: {text}")

    def say(self, line: str) -> None:
        """A line for people, now and in the log."""
        log.warning(line)
        self._display.say(f"train: {line}")

    def close(self) -> None:
        """No more records. Those who follow get some time for what they have not told yet."""
        self._display.close()
        self._metrics.close()
        self._couriers.close(self.ending)

    def _keep(self, record: Mapping[str, Any]) -> None:
        self._metrics.append(dict(record))
        fault = self._metrics.fault
        if fault and not self._is_behind:
            self.say(
                f"metrics.jsonl: {describe_os_error(fault)}. Training goes on; what is told "
                "meanwhile is "
                "written as soon as it can be"
            )
        self._is_behind = fault is not None

    def _follow_with_a_page(self, now: float) -> None:
        """Once a run has lasted so long that a page of it is worth a process."""
        if self._report_after is None or now < self._report_after:
            return
        self._report_after = None
        every = f"{self._job.config.train.report_interval:g}"
        self._start("the report", "penstock.train.report", every)

    def _start(self, title: str, module: str, word: str) -> None:
        folder = self._job.output_dir
        file = folder / LOGS / f"{module.rpartition('.')[2]}_{word}.log"
        self._couriers.start(title, [module, word, str(folder)], file)
