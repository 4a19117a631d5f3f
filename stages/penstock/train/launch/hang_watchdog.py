"""Hang watchdog: detects hung ranks on this node and reports which ones hang and where."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from penstock.core.errors import StageError
from penstock.core.machine.linux import command_line
from penstock.core.process.rank_heartbeat import RankStatus, read_heartbeats
from penstock.train.launch.job import LOGS, METRICS, Job
from penstock.train.launch.rank_failures import read_timeouts
from penstock.train.launch.rank_stacks import Stack, dump_stacks

DEFAULT_TIMEOUT_SECONDS = 1800.0
"""Seconds without progress before a report, if `launch.timeout` is unset."""

WATCH_LOG = "watch.log"
"""Log file of hang reports, in the folder and format of the rank logs."""

MAX_FRAMES = 6
"""Number of stack frames in an error message; the rank's stack file has all of them."""


class HangWatchdog:
    """Polled every second while the ranks run that `job` started on this node, each as `module`."""

    def __init__(self, job: Job, module: str = "penstock.train") -> None:
        self._job, self._module = job, module
        self._logs = job.output_dir / LOGS
        self._limit = job.config.launch.timeout
        self._heartbeats = heartbeat_folder(job)
        self._last_progress: object = None
        self._progress_time = time.monotonic()
        self._has_reported = False
        self._pids: list[int] = []
        self._handled_timeouts: set[tuple[int, float]] = set()
        self.report: str | None = None
        """The last hang report."""

    def __call__(self) -> str | None:
        """Return text to print, once per hang.

        With `launch.timeout`, hung ranks are then killed, so that torchrun restarts them or gives
        up. Raises StageError if no rank has started far enough to dump its stack.
        """
        heartbeats = read_heartbeats(self._heartbeats)
        self._record_progress(heartbeats)
        limit = self._limit or DEFAULT_TIMEOUT_SECONDS
        if time.monotonic() - self._progress_time < limit:
            return self._check_timeouts(heartbeats)
        if self._has_reported:
            return None
        self._has_reported = True
        running = self._running(heartbeats)
        if not running and self._limit:
            raise StageError(
                f"no rank has started within {limit:g} s (launch.timeout).\n"
                f"  See {self._logs}, and check that all {self._job.config.launch.nnodes} node(s) "
                "were started; raise launch.timeout if starting takes longer."
            )
        reason = f"no rank has made progress for {limit:g} s"
        self._write_report(reason + (" (launch.timeout)" if self._limit else ""), running)
        if self._limit:
            for beat in running:
                # A rank's handler of SIGTERM sets a flag, which a rank that hangs never reads.
                with suppress(ProcessLookupError):
                    os.kill(beat.pid, signal.SIGKILL)
        return self.report

    def _record_progress(self, heartbeats: Sequence[RankStatus]) -> None:
        pids = [beat.pid for beat in heartbeats]
        if pids != self._pids:
            # The ranks were (re)started, so earlier observations no longer apply.
            self._pids, self.report = pids, None
        metrics = self._job.output_dir / METRICS
        size = metrics.stat().st_size if metrics.is_file() else 0
        progress = size, [(beat.pid, beat.since) for beat in heartbeats]
        if progress != self._last_progress:
            self._last_progress, self._progress_time = progress, time.monotonic()
            self._has_reported = False

    def _check_timeouts(self, heartbeats: Sequence[RankStatus]) -> str | None:
        # A rank whose collective timed out is exiting; those that it waited for still run, and
        # only now can their stacks be dumped: the agent ends them once it sees the exit.
        records = {(f.rank, f.time) for f in read_timeouts(self._logs)}
        if records <= self._handled_timeouts:
            return None
        self._handled_timeouts |= records
        if running := self._running(heartbeats):
            self._write_report("a rank timed out waiting for another rank", running)
            return self.report
        return None

    def _running(self, heartbeats: Sequence[RankStatus]) -> list[RankStatus]:
        # By the command line: the kernel may have given a dead rank's pid to another process.
        return [beat for beat in heartbeats if self._module in command_line(beat.pid)]

    def _write_report(self, reason: str, running: Sequence[RankStatus]) -> None:
        stacks = dump_stacks(self._logs, {beat.rank: beat.pid for beat in running})
        advice = f"The stacks of all ranks are in {self._logs}/rank_N.stack. "
        if self._limit:
            advice += "Raise launch.timeout if a step, a save or a load may take longer."
        else:
            advice += "Write launch.timeout to end a run that makes no progress."
        self.report = f"{reason}. {describe(running, stacks, time.time())}\n  {advice}"
        with suppress(OSError), (self._logs / WATCH_LOG).open("a") as stream:
            # As `logging` writes entries: flows forward only lines that begin like one.
            stream.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')},000 WARNING {self.report}\n")


def heartbeat_folder(job: Job) -> Path:
    """The heartbeat folder of the ranks that `job` started on this node."""
    return job.output_dir / LOGS / f"pulse_{job.launch_id}"


def find_stragglers(running: Sequence[RankStatus], stacks: Mapping[int, Stack]) -> list[RankStatus]:
    """The ranks that others wait for: among those not waiting in a collective, the ones with the
    least progress.

    None if all are waiting: for ranks of another machine, or for each other.
    """
    busy = [
        b
        for b in running
        if not (b.waiting or (b.rank in stacks and stacks[b.rank].is_in_collective))
    ]
    least = min((b.progress for b in busy), default=None)
    return [b for b in busy if b.progress == least]


def describe(running: Sequence[RankStatus], stacks: Mapping[int, Stack], now: float) -> str:
    """Describe which ranks are behind, where they are, and which ranks wait for them."""
    if not running:
        return "No rank of this node is still running."
    stragglers = find_stragglers(running, stacks)
    straggling = {beat.rank for beat in stragglers}
    waiting = sorted((b for b in running if b.rank not in straggling), key=lambda b: b.progress)
    if stragglers:
        lines = [f"Stragglers: {len(stragglers)} of {len(running)} rank(s) of this node."]
        if waiting:
            numbers = ", ".join(map(str, sorted(beat.rank for beat in waiting)))
            lines[0] = f"{lines[0][:-1]}; rank(s) {numbers} are waiting."
        shown = stragglers
    else:
        lines = [
            f"All {len(running)} rank(s) of this node wait for other ranks: for those of another "
            "node, for the network, or for each other in different collectives."
        ]
        shown = waiting[:2]
    for beat in shown:
        lines.append(
            f"rank {beat.rank} on {beat.host} (process {beat.pid}): {beat.step} step(s) done, "
            f"{beat.phase} for {now - beat.since:.0f} s, at"
        )
        stack = stacks.get(beat.rank)
        lines += (
            [f"  {frame}" for frame in stack.frames[:MAX_FRAMES]]
            if stack
            else ["  (no stack dump: the process is stopped, or blocked in the kernel)"]
        )
    return "\n    ".join(lines)
