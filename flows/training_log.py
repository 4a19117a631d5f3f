"""Training in Prefect's logs: lines for steps and evaluations, and log entries of ranks.

Metrics come from metrics.jsonl, entries from the logs of rank 0 and of the hang watchdog. Prefect
queues log records, so an unreachable server delays nothing.
"""

import logging
import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from prefect.logging.handlers import APILogHandler
from prefect.logging.loggers import PrefectLogAdapter

from penstock.core.file_tail import FileTail
from penstock.core.remote.urls import redact_text
from penstock.train.launch.hang_watchdog import WATCH_LOG
from penstock.train.launch.job import LOGS
from penstock.train.report.format import number
from training_progress import TrainingProgress

Logger = logging.Logger | logging.LoggerAdapter[Any]

MIN_SECONDS, MAX_SECONDS = 1.0, 60.0
"""Bounds of the seconds between two lines for steps, or for evaluations."""

MAX_LINES = 200
"""The interval is the run's duration divided by this, within the bounds."""

MAX_RANK_ENTRIES = 20
"""Maximum entries of ranks that are forwarded per poll; the others are counted."""

MAX_LINE_CHARS = 2000
"""Maximum length of a line."""

LOG_ENTRY = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ([A-Z]+) (.*)", re.S)
"""An entry of a rank's log: date and second, milliseconds, level, text."""


def server_only(logger: Logger) -> Logger:
    """The run's logger without terminal output: the ranks print there themselves."""
    if not isinstance(logger, PrefectLogAdapter):
        return logger
    # Not from getLogger: a logger without a parent has no handlers but its own.
    quiet = logging.Logger(logger.logger.name, logger.getEffectiveLevel())
    quiet.addHandler(APILogHandler())
    return PrefectLogAdapter(quiet, extra=logger.extra)


class RankLog:
    """The entries that a rank's log has gained since a time: level and text of each."""

    def __init__(self, path: Path, *, since: float) -> None:
        self._tail, self._since = FileTail(path), since

    def read_new(self) -> Iterator[tuple[str, str]]:
        """Entries that earlier calls did not yield."""
        entries: list[str] = []
        for line in self._tail.read_new_lines():
            text = line.decode("utf-8", "replace")
            if LOG_ENTRY.match(text) or not entries:
                entries.append(text)
            else:
                entries[-1] += text
        for entry in entries:
            if match := LOG_ENTRY.match(entry):
                second, milliseconds, level, text = match.groups()
                # Local time, as `logging` writes it.
                time = datetime.fromisoformat(second).timestamp() + int(milliseconds) / 1000
                if time >= self._since:
                    yield level, text.rstrip("\n")


class TrainingLog:
    """Logs one training run with a bounded number of lines."""

    def __init__(self, folder: Path, logger: Logger, *, since: float) -> None:
        """Log the run in `folder` from the time `since` on."""
        logs = folder / LOGS
        self._logger, self._since = logger, since
        self._rank_logs = [
            (file, RankLog(file, since=since)) for file in (logs / "rank_0.log", logs / WATCH_LOG)
        ]
        self._last_logged = {"step": -math.inf, "evaluation": -math.inf}
        """Time of the last logged record by kind."""
        self._pending: dict[str, str] = {}
        """The latest unlogged line by kind, which came too soon after another one."""
        self._last_step, self._last_time = 0, -math.inf

    def add_record(self, record: Mapping[str, Any], progress: TrainingProgress) -> None:
        """Add the next record of metrics.jsonl; `progress` has it already."""
        if "loss" in record:
            self._warn_on_restart(record)
            self._log_rate_limited("step", record["time"], progress.line)
        elif text := _format_evaluation(record):
            self._log_rate_limited("evaluation", record["time"], f"step {record['step']:,}: {text}")

    def forward_rank_logs(self) -> None:
        """Log new entries of rank 0 and of the hang watchdog."""
        for file, rank_log in self._rank_logs:
            # An error that ended a rank is reported by the task.
            lines = [(level, text) for level, text in rank_log.read_new() if level != "ERROR"]
            for level, text in lines[:MAX_RANK_ENTRIES]:
                self._log(logging.getLevelNamesMapping().get(level, logging.INFO), text)
            if len(lines) > MAX_RANK_ENTRIES:
                self._log(
                    logging.WARNING, f"{len(lines) - MAX_RANK_ENTRIES} more lines are in {file}"
                )

    def flush(self) -> None:
        """Log the last step and evaluation if they are not logged yet."""
        for line in self._pending.values():
            self._log(logging.INFO, line)
        self._pending.clear()

    def _log_rate_limited(self, kind: str, time: float, line: str) -> None:
        if time - self._last_logged[kind] >= min(
            MAX_SECONDS, max(MIN_SECONDS, (time - self._since) / MAX_LINES)
        ):
            self._last_logged[kind] = time
            self._pending.pop(kind, None)
            self._log(logging.INFO, line)
        elif time > self._last_logged[kind]:
            self._pending[kind] = line

    def _warn_on_restart(self, record: Mapping[str, Any]) -> None:
        step, time = record["step"], record["time"]
        # Resumed ranks replace the file; its older records are read again, and are no restart.
        if step <= self._last_step and time > self._last_time:
            self._log(
                logging.WARNING, f"the ranks were started again; training is back at {step:,}"
            )
        self._last_step, self._last_time = step, time

    def _log(self, level: int, text: str) -> None:
        self._logger.log(level, "%s", redact_text(text)[:MAX_LINE_CHARS])


def _format_evaluation(record: Mapping[str, Any]) -> str:
    """The metrics of an evaluation, without those of single files and groups."""
    return ", ".join(
        f"{name} {number(value)}"
        for name, value in record.items()
        if name.startswith("eval_") and "/" not in name and isinstance(value, int | float)
    )
