"""Rank failure reports: exceptions written by ranks, and signals reported by torchrun agents."""

import json
import platform
import signal
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.core.errors import PenstockError, StageError
from penstock.core.files import read_json
from penstock.core.os_errors import describe_os_error, is_of_the_machine

CRASHES = "deaths_*.json"
"""Written by the agent of each node: ranks that were killed by a signal."""

_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "DistNetworkError")
"""Errors of ranks that lost their peers. Ranks of a node that was preempted report nothing."""

_MEMORY_WORDS = ("OutOfMemoryError", "out of memory", "DefaultCPUAllocator: ")
"""Of PyTorch's caching allocator, of CUDA and NCCL, and of PyTorch on CPUs."""

_TIMEOUT_WORDS = ("Timed out waiting", "timed out", "Timeout", "timeout")


@dataclass(frozen=True)
class Failure:
    """The exception of a rank."""

    rank: int
    host: str
    time: float
    message: str
    """The message of one of this project's errors; empty for other exceptions."""
    error: str
    exit_code: int
    traceback: str


@dataclass(frozen=True)
class RankCrash:
    """A rank that was killed by a signal before it could report an error."""

    rank: int
    host: str
    pid: int
    signal: int
    time: float
    """Whole seconds since the epoch, rounded down, which is the resolution of torchrun."""


def crash_file(logs: Path, launch: str) -> Path:
    """The file in which the agent started by `launch` reports crashed ranks."""
    return logs / CRASHES.replace("*", launch)


def failure_file(logs: Path, rank: int) -> Path:
    """The error file of a rank."""
    return logs / f"failure_{rank}.json"


def write_failure(logs: Path, rank: int, error: Exception) -> None:
    """Write this rank's error for the launcher. The earliest error is the cause; later ones follow
    from it."""
    failure = Failure(
        rank=rank,
        host=platform.node(),
        time=time.time(),
        message=str(error) if isinstance(error, PenstockError) else "",
        error=describe_os_error(error, logs.parent)
        if is_of_the_machine(error)
        else f"{type(error).__name__}: {error}",
        exit_code=error.exit_code if isinstance(error, PenstockError) else 1,
        traceback="".join(traceback.format_exception(error)),
    )
    failure_file(logs, rank).write_text(json.dumps(asdict(failure)))


def first_failure(logs: Path) -> str | None:
    """The message of the rank that failed first, if any."""
    first = next(iter(_read_failures(logs)), None)
    return (first.message or first.error) if first else None


def ran_out_of_memory(logs: Path) -> bool:
    """Whether a rank failed as memory could not be allocated. Not known of ranks that the kernel
    killed for it, which a user may have killed as well."""
    errors = [f.error for f in _read_failures(logs) if not f.message]
    return any(pattern in error for error in errors for pattern in _MEMORY_WORDS)


def read_timeouts(logs: Path) -> list[Failure]:
    """Failures of ranks that timed out waiting for others."""
    return [
        f for f in _read_failures(logs) if any(pattern in f.error for pattern in _TIMEOUT_WORDS)
    ]


def build_error(logs: Path, status: int, hang_report: str | None = None) -> StageError:
    """Why the ranks did not finish; `hang_report` is the hang watchdog's report.

    The earliest error is reported: later ones are mostly lost connections to the rank that failed.
    """
    failures, crashes = _read_failures(logs), _read_crashes(logs)
    # An error of ours names its cause; an earlier one of torch or NCCL may only follow from it.
    first = next((f for f in failures if f.message), failures[0] if failures else None)
    if hang_report and (first is None or not first.message):
        return _retryable(hang_report)
    # The agent finds a crash a moment later: another rank may have reported its lost connection.
    if crashes and (first is None or crashes[0].time <= first.time or _has_lost_peer(first)):
        text = _describe_crash(crashes[0], logs)
        return _retryable(text) if crashes[0].signal == signal.SIGKILL else StageError(text)
    if first is None:
        return _retryable(
            f"a rank died without an error message (torchrun's exit status {status}).\n"
            f"  It may have been killed because memory ran out; see {logs}."
        )
    if first.message:
        failure = StageError(first.message)
        failure.exit_code = first.exit_code
        return failure
    failure = StageError(
        f"rank {first.rank} on {first.host}: {first.error}\n"
        f"  The traceback is in {logs / f'rank_{first.rank}.log'}."
    )
    failure.may_pass = _has_lost_peer(first)
    return failure


def _has_lost_peer(failure: Failure) -> bool:
    """Whether the rank failed because another one was gone."""
    return not failure.message and any(pattern in failure.error for pattern in _LOST_PEER)


def _retryable(text: str) -> StageError:
    """A retryable error: the run may succeed from its newest checkpoint."""
    failure = StageError(text)
    failure.may_pass = True
    return failure


def _describe_crash(crash: RankCrash, logs: Path) -> str:
    name = signal.Signals(crash.signal).name
    text = f"rank {crash.rank} on {crash.host} (process {crash.pid}) was killed by {name}"
    if crash.signal == signal.SIGKILL:
        return (
            f"{text}: by the kernel because memory ran out, or by a user.\n"
            f"  See {logs / f'rank_{crash.rank}.log'} and the system's log; run the same command "
            "again to resume from the newest checkpoint, or write launch.max_restarts."
        )
    return (
        f"{text}, an error in native code.\n"
        f"  Its output is above; see also {logs / f'rank_{crash.rank}.log'}."
    )


def _read_failures(logs: Path) -> list[Failure]:
    failures: list[Failure] = []
    for path in logs.glob("failure_*.json"):
        with suppress(ValueError, TypeError):  # The file is being written.
            failures.append(Failure(**read_json(path)))
    return sorted(failures, key=lambda f: f.time)


def _read_crashes(logs: Path) -> list[RankCrash]:
    """Crashes of the last start of the ranks on each node, except for ranks that were asked to
    stop."""
    lists = [record for path in logs.glob(CRASHES) for record in read_json(path)]
    crashes = [RankCrash(**record) for record in lists]
    # With SIGTERM torchrun ends the other ranks once one has failed: they are no cause.
    return sorted((d for d in crashes if d.signal != signal.SIGTERM), key=lambda d: d.time)
