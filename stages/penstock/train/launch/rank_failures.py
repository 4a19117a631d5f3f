"""How ranks ended: what each left of its own failure, and what their agents saw of their deaths."""

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

DEATHS = "deaths_*.json"
"""Written by the agent of each node: its ranks that a signal has ended."""

_LOST = ("Connection closed by peer", "Connection reset by peer", "DistNetworkError")
"""What ranks say of others that are gone: those of a machine that was taken away say nothing."""

_TIMEOUTS = ("Timed out waiting", "timed out", "Timeout", "timeout")


@dataclass(frozen=True)
class Failure:
    """A rank's error, in its own words."""

    rank: int
    host: str
    time: float
    message: str
    """The text of an error that was raised for people to read; else empty."""
    error: str
    exit_code: int
    traceback: str


@dataclass(frozen=True)
class RankCrash:
    """A rank that a signal ended before it could say anything."""

    rank: int
    host: str
    pid: int
    signal: int
    time: float
    """Whole seconds since the epoch, rounded down: that is all torchrun tells."""


def deaths_file(logs: Path, launch: str) -> Path:
    """Where the agent that `launch` started tells of deaths."""
    return logs / DEATHS.replace("*", launch)


def failure_file(logs: Path, rank: int) -> Path:
    """Where a rank leaves its error."""
    return logs / f"failure_{rank}.json"


def leave_failure(logs: Path, rank: int, error: Exception) -> None:
    """Keep this rank's error for the launcher: the earliest is the cause, the rest are echoes."""
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
    """What the first rank that failed said, if any did."""
    first = next(iter(_failures(logs)), None)
    return (first.message or first.error) if first else None


def timed_out_records(logs: Path) -> list[Failure]:
    """Failures of ranks that waited in vain for others."""
    return [f for f in _failures(logs) if any(word in f.error for word in _TIMEOUTS)]


def what_happened(logs: Path, status: int, hung: str | None = None) -> StageError:
    """Why the ranks came to no end; `hung` is what was seen of those that did not move.

    What came first is told: what came later is mostly lost connections to the rank it came to.
    """
    failures, deaths = _failures(logs), _deaths(logs)
    first = next((f for f in failures if f.message), failures[0] if failures else None)
    if hung and (first is None or not first.message):
        return _passing(hung)
    if deaths and (first is None or deaths[0].time <= first.time):
        text = _of_death(deaths[0], logs)
        return _passing(text) if deaths[0].signal == signal.SIGKILL else StageError(text)
    if first is None:
        return _passing(
            f"a training process died without a word (torchrun's exit status {status}).\n"
            f"  It may have been killed for memory; see {logs}."
        )
    if first.message:
        failure = StageError(first.message)
        failure.exit_code = first.exit_code
        return failure
    failure = StageError(
        f"rank {first.rank} on {first.host}: {first.error}\n"
        f"  The traceback is in {logs / f'rank_{first.rank}.log'}."
    )
    failure.may_pass = any(word in first.error for word in _LOST)
    return failure


def _passing(text: str) -> StageError:
    """An error of a run that may go well from its newest checkpoint."""
    failure = StageError(text)
    failure.may_pass = True
    return failure


def _of_death(death: RankCrash, logs: Path) -> str:
    name = signal.Signals(death.signal).name
    text = f"rank {death.rank} on {death.host} (process {death.pid}) was ended by {name}"
    if death.signal == signal.SIGKILL:
        return (
            f"{text}: by the system for want of memory, or by somebody.\n"
            f"  See {logs / f'rank_{death.rank}.log'} and the system's log; run the same command "
            "again to go on from the newest checkpoint, or write launch.max_restarts."
        )
    return (
        f"{text}, a fault in native code.\n"
        f"  What it printed is above; see also {logs / f'rank_{death.rank}.log'}."
    )


def _failures(logs: Path) -> list[Failure]:
    found: list[Failure] = []
    for path in logs.glob("failure_*.json"):
        with suppress(ValueError, TypeError):  # one that is being written just now
            found.append(Failure(**read_json(path)))
    return sorted(found, key=lambda f: f.time)


def _deaths(logs: Path) -> list[RankCrash]:
    """Those of the last start of the ranks on each node, but for ranks that were asked to end."""
    lists = [record for path in logs.glob(DEATHS) for record in read_json(path)]
    found = [RankCrash(**record) for record in lists]
    return sorted((d for d in found if d.signal != signal.SIGTERM), key=lambda d: d.time)
