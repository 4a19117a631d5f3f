"""Prefect artifacts of stages: a table for each, and the live progress of training.

A thread of the flow follows the files that the ranks write. Nothing here stops or delays a run: an
update that the server does not accept is sent again at the next poll, or not at all.
"""

import contextvars
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import httpx
from prefect import get_client
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from penstock.core.cache.store import StageResult
from penstock.core.file_tail import FileTail
from penstock.core.files import read_json
from penstock.train.launch.job import ENVIRONMENT, METRICS, REPORT
from penstock.train.trackers.registry import TITLES
from penstock.train.trackers.run_info import TRACKERS_FOLDER
from training_log import Logger, TrainingLog, server_only
from training_progress import TrainingProgress

WARNING = re.compile(r"(\w+: )?warning: ")
"""The prefix of warnings among log lines."""

MIN_POLL_SECONDS, MAX_POLL_SECONDS = 5.0, 60.0
"""Bounds of the poll interval in seconds; it grows with the duration of the run."""

MAX_POLLS = 200
"""The poll interval is the run's duration divided by this, within the bounds."""

JOIN_SECONDS = 5.0
"""Seconds that the end of training waits for the last update."""

# Of an artifact request: no stage waits long for the server, for which a flow retries 20 times.
RETRIES = 2


def show_stage_result(outcome: StageResult, name: str, logger: Logger) -> None:
    """Create the table of a stage's result in the run called `name`, one fact per row."""
    rows = {"status": outcome.status, "key": outcome.key, "path": outcome.where, **outcome.facts}
    table = [{"fact": fact, "value": _format_fact(value)} for fact, value in rows.items()]
    with ignore_server_errors(f"the table of {outcome.stage}", logger):
        create_table_artifact(table, f"penstock-{outcome.stage}", f"{name}: {outcome.status}")


def build_notify(stage: str, name: str, logger: Logger) -> Callable[[str], None]:
    """A function that logs the notices of a stage of the run called `name` and creates an artifact
    for each, for example that it waits for another run."""

    def tell(line: str) -> None:
        log_notice(line, logger)
        with ignore_server_errors(f"the notice of {stage}", logger):
            create_markdown_artifact(line, "penstock-notice", f"{name}: {stage}")

    return tell


def log_notice(line: str, logger: Logger) -> None:
    """Log a line, as a warning if it begins with `warning:`."""
    logger.log(logging.WARNING if WARNING.match(line) else logging.INFO, "%s", line)


class _RunLogHandler(logging.Handler):
    """Forwards records to the logger of a flow run."""

    def __init__(self, run_logger: Logger) -> None:
        super().__init__()
        self._run_logger = run_logger

    def emit(self, record: logging.LogRecord) -> None:
        self._run_logger.log(record.levelno, "%s", record.getMessage())


@contextmanager
def forward_prepare_logs(run_logger: Logger) -> Generator[None]:
    """While the block runs, forward the records of `penstock.prepare` to the flow run's log only.

    PREFECT_LOGGING_EXTRA_LOGGERS would have to be set before Prefect loads a deployed script.
    """
    logger, handler = logging.getLogger("penstock.prepare"), _RunLogHandler(run_logger)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


@contextmanager
def ignore_server_errors(action: str, logger: Logger) -> Generator[None]:
    """Few retries, and a warning instead of an exception, for requests that may fail."""
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: RETRIES}):
            yield
    except (httpx.HTTPError, PrefectException) as error:
        logger.warning("%s could not be shown: %s: %s", action, type(error).__name__, error)


class TrainingLinks:
    """Link artifacts to a training run's report and trackers, each created once."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._shown: set[str] = set()

    def show(self) -> None:
        """Create the links that are available and were not created before."""
        for key, url, title in self._known():
            if key not in self._shown:
                create_link_artifact(url, f"{self._name}: {title}", key, description=url)
                self._shown.add(key)

    def _known(self) -> Iterator[tuple[str, str, str]]:
        if (report := self._folder / REPORT).is_file():
            # `as_uri` raises for a relative path.
            yield "penstock-report", report.resolve().as_uri(), "report"
        for memory in sorted((self._folder / TRACKERS_FOLDER).glob("*.json")):
            name = memory.stem
            if url := read_json(memory).get("url"):
                yield f"penstock-{name}", url, TITLES.get(name, name)


@contextmanager
def show_training(folder: Path, name: str, logger: Logger) -> Generator[None]:
    """While the block runs, show and log the training called `name` in `folder`."""
    ended = threading.Event()
    shown = TrainingMonitor(folder, name, logger)
    # The thread needs the flow's context: the server's address and the flow run.
    run = contextvars.copy_context().run
    # A daemon, so that a request without an answer does not keep the process alive after the join.
    thread = threading.Thread(target=run, args=(shown.follow, ended), daemon=True)
    thread.start()
    try:
        yield
        shown.is_complete = True
    finally:
        ended.set()
        thread.join(JOIN_SECONDS)


class TrainingMonitor:
    """One training run in Prefect's UI: a progress bar, a table, links, and log lines."""

    def __init__(self, folder: Path, name: str, logger: Logger) -> None:
        self._folder, self._name, self._logger = folder, name, logger
        self._links = TrainingLinks(folder, name)
        self._since = time.time()
        self._metrics = FileTail(folder / METRICS)
        self._progress = TrainingProgress()
        self._log = TrainingLog(folder, server_only(logger), since=self._since)
        self._bar: UUID | None = None
        self._table: UUID | None = None
        self._is_warned = False
        self.is_complete = False
        """Whether the stage has completed."""

    def follow(self, ended: threading.Event) -> None:
        """Update at intervals, and once more at the end."""
        # A failed update is followed by the next one; only the flow itself waits for the server.
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
            began = time.monotonic()
            while not ended.wait(_poll_interval(time.monotonic() - began)):
                self._update()
            self._update()
            self._log.flush()

    def _update(self) -> None:
        self._log.forward_rank_logs()
        self._read_new_records()
        self._progress.is_ended = self.is_complete
        if not self._progress.step and not self.is_complete:
            return  # the files may still be those of another run
        try:
            if self._progress.step:
                self._show()
            self._links.show()
        except (httpx.HTTPError, PrefectException, OSError) as error:
            if not self._is_warned:
                self._logger.warning(
                    "training continues, but its progress cannot be shown at present: %s: %s",
                    type(error).__name__,
                    error,
                )
            self._is_warned = True
        else:
            self._is_warned = False

    def _read_new_records(self) -> None:
        for line in self._metrics.read_new_lines():
            record = json.loads(line)
            # A run that resumes keeps the records of earlier starts in the file.
            if record["time"] < self._since:
                continue
            # Each time: restarted ranks write the file again.
            self._progress.read_total(self._folder / ENVIRONMENT)
            self._progress.add_record(record)
            self._log.add_record(record, self._progress)

    def _show(self) -> None:
        progress = self._progress
        brief = f"{self._name}: {progress.summary}"
        if self._bar is None:
            self._bar = cast(
                UUID, create_progress_artifact(progress.percent, "penstock-progress", brief)
            )
        else:
            update_progress_artifact(self._bar, progress.percent, brief)
        if self._table is None:
            self._table = cast(
                UUID, create_markdown_artifact(progress.table, "penstock-training", brief)
            )
        else:
            # Prefect (3.8.8) has a function to update progress artifacts, and none for others.
            get_client(sync_client=True).update_artifact(
                self._table, ArtifactUpdate(data=progress.table, description=brief)
            )


def _poll_interval(lasted: float) -> float:
    return min(MAX_POLL_SECONDS, max(MIN_POLL_SECONDS, lasted / MAX_POLLS))


def _format_fact(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
