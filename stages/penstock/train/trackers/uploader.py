"""Uploader process: sends a run's records to one tracker.

It follows metrics.jsonl, so the file is its queue: it may be slow, wait, fail or die without
affecting training, and the next process continues after the last uploaded record.
"""

import faulthandler
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from penstock.core.files import read_json, write_json
from penstock.train.launch.job import JOB, METRICS, Job
from penstock.train.trackers.registry import KNOWN
from penstock.train.trackers.run_info import TRACKERS_FOLDER, RunInfo
from penstock.train.trackers.scalars import record_kind, record_values
from penstock.train.trackers.sidecar import End, work_beside
from penstock.train.trackers.tail import follow_lines
from penstock.train.trackers.tracker import Begin, Memory, Tracker

ANSWER_SECONDS = 120.0
"""Timeout in seconds of one tracker call; on a timeout this process exits."""
PAUSES = (1.0, 5.0, 25.0)
"""Seconds between tries of a failing call."""
REMEMBER_SECONDS = 5.0
"""Seconds between saves of the upload state."""

NICENESS = 10
"""Nice value: training has priority."""

T = TypeVar("T")


def main(name: str, folder: Path) -> None:
    """Upload until standard input closes. On failure, the last line on stderr says why."""
    end = work_beside(NICENESS)
    try:
        begin: Begin = import_module(f"penstock.train.trackers.{KNOWN[name].adapter}").begin
        # The uploader of an earlier start of the ranks may still be finishing.
        with FileLock(folder / TRACKERS_FOLDER / f".{name}.lock"):
            carry(name, folder, begin, end)
    except Exception as error:  # noqa: BLE001 - top level: printed, exit status 1
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        # The tracker's own threads or exit handlers could block a normal exit.
        os._exit(1)
    sys.stderr.flush()
    os._exit(0)


def carry(name: str, folder: Path, begin: Begin, end: End) -> None:
    """Upload all records of metrics.jsonl that were not uploaded before, until the end."""
    file = folder / TRACKERS_FOLDER / f"{name}.json"
    memory: Memory = read_json(file) if file.is_file() else {}
    card = RunInfo.of(Job.read(folder / JOB))
    tracker = _patiently(lambda: begin(card, memory))
    write_json(file, memory)
    told = UploadState(tracker, memory, card.every[name])
    noted = time.monotonic()
    for record in follow_lines(folder / METRICS, end.has_come):
        if record is not None:
            told.upload(record)
        if time.monotonic() - noted > REMEMBER_SECONDS:
            write_json(file, memory)
            noted = time.monotonic()
    told.upload_last()
    write_json(file, memory)
    _patiently(lambda: tracker.close(end.ending))


class UploadState:
    """The last uploaded step by kind of record, so that nothing is uploaded twice."""

    def __init__(self, tracker: Tracker, memory: Memory, every: int) -> None:
        self._tracker, self._every = tracker, every
        self._until: dict[str, int] = memory.setdefault("told", {})
        self._left_out: Mapping[str, Any] | None = None

    def upload(self, record: Mapping[str, Any]) -> None:
        """Upload a record, unless it was uploaded before or its step is not on the logging
        interval."""
        kind = record_kind(record)
        if kind is None or record["step"] <= self._until.get(kind, -1):
            return
        if kind == "train" and record["step"] % self._every:
            self._left_out = record
            return
        self._tell(kind, record)

    def upload_last(self) -> None:
        """Upload the last step if it was skipped."""
        if self._left_out and self._left_out["step"] > self._until.get("train", -1):
            self._tell("train", self._left_out)

    def _tell(self, kind: str, record: Mapping[str, Any]) -> None:
        step, values = record["step"], record_values(record)
        _patiently(lambda: self._tracker.log(step, values, record.get("time", time.time())))
        self._until[kind] = step


def _patiently(call: Callable[[], T]) -> T:
    """Call with retries; a call that hangs ends the process."""
    for pause in PAUSES:
        try:
            return _in_time(call)
        except Exception as error:  # noqa: BLE001 - retried
            sys.stderr.write(f"will be tried again: {type(error).__name__}: {error}\n")
            sys.stderr.flush()
            time.sleep(pause)
    return _in_time(call)


def _in_time(call: Callable[[], T]) -> T:
    faulthandler.dump_traceback_later(ANSWER_SECONDS, exit=True)
    try:
        return call()
    finally:
        faulthandler.cancel_dump_traceback_later()
