"""Uploader process: sends a run's records to one tracker.

It follows metrics.jsonl, so the file is its queue: it may be slow, wait, fail or die without
affecting training, and the next process continues after the last uploaded record.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from penstock.core.extensions import TRACKERS
from penstock.core.file_lock import acquire_lock
from penstock.core.file_tail import FileTail
from penstock.core.files import read_json, write_json
from penstock.train.launch.job import JOB, METRICS, Job
from penstock.train.metrics.jsonl import is_number, parse_line
from penstock.train.trackers.run_info import TRACKERS_FOLDER, RunInfo
from penstock.train.trackers.sidecar import RunEnd, start_sidecar
from penstock.train.trackers.tracker import PackageTracker, ResumeState, StartRun, Tracker

CALL_TIMEOUT_SECONDS = 120.0
"""Timeout in seconds of one tracker call; on a timeout this process exits."""
RETRY_DELAYS = (1.0, 5.0, 25.0)
"""Seconds between tries of a failing call."""
SAVE_SECONDS = 5.0
"""Seconds between saves of the upload state."""

POLL_SECONDS = 0.5
"""Seconds between reads of the file."""

NICENESS = 10
"""Nice value: training has priority."""

Kind = Literal["train", "eval"]

GROUPS = {"phases": "seconds", "grad_norms": "grad_norm", "param_norms": "param_norm"}
"""Name prefixes of nested values, where they differ from the record's names."""

NON_METRICS = {"step", "time", "memory_rank"}

T = TypeVar("T")


def main(name: str, folder: Path) -> None:
    """Upload until standard input closes. On failure, the last line on stderr says why."""
    end = start_sidecar(NICENESS)
    try:
        options = Job.read(folder / JOB).config.train.trackers.get(name, {})
        tracker = TRACKERS.build(name, options)
        start_run: StartRun = tracker.start_run if isinstance(tracker, PackageTracker) else tracker
        # The uploader of an earlier start of the ranks may still be finishing.
        with acquire_lock(folder / TRACKERS_FOLDER / f".{name}.lock"):
            upload_run(name, folder, start_run, end)
    except Exception as error:  # noqa: BLE001 - top level: printed, exit status 1
        # The supervisor shows the last line to the user.
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        # The tracker's own threads or exit handlers could block a normal exit.
        os._exit(1)
    sys.stderr.flush()
    os._exit(0)


def upload_run(name: str, folder: Path, start_run: StartRun, end: RunEnd) -> None:
    """Upload all records of metrics.jsonl that were not uploaded before, until the end."""
    file = folder / TRACKERS_FOLDER / f"{name}.json"
    state: ResumeState = read_json(file) if file.is_file() else {}
    run_info = RunInfo.from_job(Job.read(folder / JOB))
    tracker = _with_retries(lambda: start_run(run_info, state))
    # Before the first record: after a kill the next process would create a second run.
    write_json(file, state)
    uploads = UploadState(tracker, state, run_info.log_intervals[name])
    last_save = time.monotonic()
    for record in follow_lines(folder / METRICS, end.event):
        if record is not None:
            uploads.upload(record)
        if time.monotonic() - last_save > SAVE_SECONDS:
            write_json(file, state)
            last_save = time.monotonic()
    uploads.upload_last()
    write_json(file, state)
    _with_retries(lambda: tracker.close(end.ending))


def follow_lines(path: Path, stop: threading.Event) -> Iterator[dict[str, Any] | None]:
    """Yield each complete record in `path` as it appears; None if there is no more for now.

    Ends once `stop` is set and the rest has been read.
    """
    tail = FileTail(path)
    while True:
        # Check before reading, so that everything written before the end is read.
        is_last = stop.is_set()
        for line in tail.read_new_lines():
            yield parse_line(line, path, tail.num_lines)
        if is_last:
            return
        yield None
        stop.wait(POLL_SECONDS)


class UploadState:
    """The last uploaded step by kind of record, so that nothing is uploaded twice."""

    def __init__(self, tracker: Tracker, state: ResumeState, every: int) -> None:
        self._tracker, self._every = tracker, every
        self._last_steps: dict[str, int] = state.setdefault("told", {})
        self._skipped: Mapping[str, Any] | None = None

    def upload(self, record: Mapping[str, Any]) -> None:
        """Upload a record, unless it was uploaded before or its step is not on the logging
        interval."""
        kind = record_kind(record)
        if kind is None or record["step"] <= self._last_steps.get(kind, -1):
            return
        if kind == "train" and record["step"] % self._every:
            self._skipped = record
            return
        self._send(kind, record)

    def upload_last(self) -> None:
        if self._skipped and self._skipped["step"] > self._last_steps.get("train", -1):
            self._send("train", self._skipped)

    def _send(self, kind: str, record: Mapping[str, Any]) -> None:
        step, values = record["step"], record_values(record)
        _with_retries(lambda: self._tracker.log(step, values, record.get("time", time.time())))
        self._last_steps[kind] = step


def _with_retries(call: Callable[[], T]) -> T:
    """Call with retries; a call that hangs ends the process."""
    for pause in RETRY_DELAYS:
        try:
            return _with_timeout(call)
        except Exception as error:  # noqa: BLE001 - retried
            sys.stderr.write(f"retrying: {type(error).__name__}: {error}\n")
            sys.stderr.flush()
            time.sleep(pause)
    return _with_timeout(call)


def _with_timeout(call: Callable[[], T]) -> T:
    # Its thread needs no GIL, so it also ends a call that blocks in native code.
    faulthandler.dump_traceback_later(CALL_TIMEOUT_SECONDS, exit=True)
    try:
        return call()
    finally:
        faulthandler.cancel_dump_traceback_later()


def record_kind(record: Mapping[str, Any]) -> Kind | None:
    """Whether it is a step or an evaluation; None: neither, without scalars."""
    if "loss" in record:
        return "train"
    return "eval" if any(name.startswith("eval_") for name in record) else None


def record_values(record: Mapping[str, Any]) -> dict[str, float]:
    """`train/loss`, `eval/loss`, `seconds/optimizer`, `grad_norm/layers.3`, `router/entropy.1`."""
    return dict(_flatten(record))


def _flatten(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if name in NON_METRICS:
            continue
        if name == "routers":
            yield from _router_scalars(value)
        elif isinstance(value, Mapping):
            for inner, number in value.items():
                if is_number(number):
                    yield f"{GROUPS.get(name, name)}/{inner}", float(number)
        elif is_number(value):
            evaluated = name.removeprefix("eval_")
            yield f"{'train' if evaluated == name else 'eval'}/{evaluated}", float(value)


def _router_scalars(routers: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Router entropy per layer; not the token count of each expert."""
    for name in ("entropy", "imbalance"):
        for layer, value in zip(routers["layers"], routers[name], strict=True):
            yield f"router/{name}.{layer}", float(value)
