"""Noticing that the ranks of this node hang, and saying which of them and where."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from penstock.core.errors import StageError
from penstock.core.process.rank_heartbeat import RankStatus, beats
from penstock.train.launch.job import LOGS, METRICS, Job
from penstock.train.launch.rank_failures import timed_out_records
from penstock.train.launch.rank_stacks import Stack, ask

DEFAULT_TIMEOUT_SECONDS = 1800.0
"""How long nothing may move before it is told, where `launch.timeout` is unset."""

WATCH_LOG = "watch.log"
"""What was seen of ranks that hang, beside their own logs and written like them."""

FRAMES = 6
"""Calls of a stack that an error shows; all of them are in the ranks' files."""


class HangWatchdog:
    """Asked every second while ranks run; they are those of this node that `job` started."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._logs = job.output_dir / LOGS
        self._limit = job.config.launch.timeout
        self._pulses = pulse_folder(job)
        self._seen: object = None
        self._since = time.monotonic()
        self._told = False
        self._pids: list[int] = []
        self._heeded: set[tuple[int, float]] = set()
        self.report: str | None = None
        """What was found the last time that ranks hung."""

    def __call__(self) -> str | None:
        """What to print, once for each time that ranks hang.

        With `launch.timeout` the ranks that hang are killed then, so that torchrun starts them
        again or gives up. Raises StageError if none has come far enough to be asked for its stack.
        """
        last = beats(self._pulses)
        self._note(last)
        limit = self._limit or DEFAULT_TIMEOUT_SECONDS
        if time.monotonic() - self._since < limit:
            return self._after_a_timeout(last)
        if self._told:
            return None
        self._told = True
        running = _running(last)
        if not running and self._limit:
            raise StageError(
                f"nothing has begun for {limit:g} s (launch.timeout).\n"
                f"  See {self._logs}, and whether all {self._job.config.launch.nnodes} machine(s) "
                "were started; raise launch.timeout if starting takes longer."
            )
        what = f"nothing has moved for {limit:g} s"
        self._tell(what + (" (launch.timeout)" if self._limit else ""), running)
        if self._limit:
            for beat in running:
                _kill(beat)
        return self.report

    def _note(self, last: Sequence[RankStatus]) -> None:
        """See what has moved since the last look."""
        pids = [beat.pid for beat in last]
        if pids != self._pids:
            # They were started (again): what was wrong before is past.
            self._pids, self.report = pids, None
        metrics = self._job.output_dir / METRICS
        size = metrics.stat().st_size if metrics.is_file() else 0
        moved = size, [(beat.pid, beat.since) for beat in last]
        if moved != self._seen:
            self._seen, self._since, self._told = moved, time.monotonic(), False

    def _after_a_timeout(self, last: Sequence[RankStatus]) -> str | None:
        """A rank has waited in vain and is ending; those that it waited for are still there."""
        records = {(f.rank, f.time) for f in timed_out_records(self._logs)}
        if records <= self._heeded:
            return None
        self._heeded |= records
        if running := _running(last):
            self._tell("a rank has waited in vain for another", running)
            return self.report
        return None

    def _tell(self, what: str, running: Sequence[RankStatus]) -> None:
        stacks = ask(self._logs, {beat.rank: beat.pid for beat in running})
        advice = f"The stacks of all are in {self._logs}/rank_N.stack. "
        if self._limit:
            advice += "Raise launch.timeout if a step, a save or a load may take longer."
        else:
            advice += "Write launch.timeout to have a run ended that does not move."
        self.report = f"{what}. {describe(running, stacks, time.time())}\n  {advice}"
        with suppress(OSError), (self._logs / WATCH_LOG).open("a") as stream:
            stream.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')},000 WARNING {self.report}\n")


def pulse_folder(job: Job) -> Path:
    """Where the ranks that `job` started on this node tell what they do."""
    return job.output_dir / LOGS / f"pulse_{job.launch}"


def behind(running: Sequence[RankStatus], stacks: Mapping[int, Stack]) -> list[RankStatus]:
    """The ranks that others wait for: of those that wait for nobody, the ones that are least far.

    None where all wait: for ranks of another machine, or for each other.
    """
    busy = [b for b in running if not (b.waiting or (b.rank in stacks and stacks[b.rank].waits))]
    least = min((b.progress for b in busy), default=None)
    return [b for b in busy if b.progress == least]


def describe(running: Sequence[RankStatus], stacks: Mapping[int, Stack], now: float) -> str:
    """Which ranks are behind, where, and who waits for them."""
    if not running:
        return "No process of this machine is left."
    culprits = behind(running, stacks)
    named = {beat.rank for beat in culprits}
    others = sorted((b for b in running if b.rank not in named), key=lambda b: b.progress)
    if culprits:
        lines = [f"Behind: {len(culprits)} of {len(running)} process(es) of this machine."]
        if others:
            lines[0] = f"{lines[0][:-1]}; rank(s) {_ranks(others)} are waiting."
        shown = culprits
    else:
        lines = [
            f"All {len(running)} process(es) of this machine wait for other ranks: for those of "
            "another machine, for the network, or for each other in different operations."
        ]
        shown = others[:2]
    for beat in shown:
        lines.append(
            f"rank {beat.rank} on {beat.host} (process {beat.pid}): {beat.step} step(s) done, "
            f"{beat.phase} for {now - beat.since:.0f} s, at"
        )
        stack = stacks.get(beat.rank)
        lines += (
            [f"  {frame}" for frame in stack.frames[:FRAMES]]
            if stack
            else ["  (no answer: it is stopped, or blocked in the kernel)"]
        )
    return "\n    ".join(lines)


def _ranks(some: Sequence[RankStatus]) -> str:
    return ", ".join(str(rank) for rank in sorted(beat.rank for beat in some))


def _running(last: Sequence[RankStatus]) -> list[RankStatus]:
    return [beat for beat in last if _is_rank(beat.pid)]


def _is_rank(pid: int) -> bool:
    """Whether that process is one of ours still, and not another with its number."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"penstock.train" in words


def _kill(beat: RankStatus) -> None:
    with suppress(ProcessLookupError):
        os.kill(beat.pid, signal.SIGKILL)
