"""Outcome of a command: its reply, on which all ranks agree."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace

from penstock.core.errors import PenstockError
from penstock.core.os_errors import describe_os_error, is_full_disk
from penstock.engine.distributed.broadcast import ControlBroadcast
from penstock.server.protocol.codec import Code, Codec, error_category
from penstock.server.protocol.worker_commands import Command, CommandFailure, Reply
from penstock.server.worker.errors import error_code

T = TypeVar("T")

log = logging.getLogger("penstock.server.worker")

_FAILURES = Codec[CommandFailure](CommandFailure)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a command, the same on all ranks except for rank 0's result."""

    reply: Reply | CommandFailure
    unrecoverable: str = ""  # Why the ranks cannot continue; empty: they can


def agree(command: Command, call: Callable[[], T], broadcast: ControlBroadcast) -> T | Outcome:
    """The result of a call that all ranks make for a command, or the failure of any of them."""
    result: T | None = None
    failure: CommandFailure | None = None
    try:
        result = call()
    except PenstockError as error:
        failure = failure_of(command, error)
    except Exception as error:
        # No agreement: other ranks may be blocked elsewhere until this rank exits.
        log.exception("%s failed", type(command.operation).__name__)
        return unrecoverable(command, error)
    frames = broadcast.all_gather_errors(None if failure is None else _FAILURES.encode(failure))
    failures = [_FAILURES.decode(frame) for frame in frames if frame is not None]
    if failures:
        return Outcome(failures[0])
    assert result is not None
    return result


def failure_of(command: Command, error: PenstockError) -> CommandFailure:
    """The failure of a command that changed nothing."""
    return to_failure(command, str(error), error_code(error))


def unrecoverable(command: Command, error: Exception) -> Outcome:
    """After an unexpected error the state of the ranks is undefined."""
    is_full = is_full_disk(error)
    why = describe_os_error(error) if is_full else f"{type(error).__name__}: {error}"
    message = (
        f"the workers failed: {why}\n  They are restarted, with every model as it was saved last."
    )
    failure = to_failure(command, message, "storage_limit" if is_full else "internal")
    return Outcome(replace(failure, needs_restart=True), why)


def to_failure(command: Command, error: str, code: Code) -> CommandFailure:
    """The failure of a command for this reason."""
    return CommandFailure(id=command.id, error=error, category=error_category(code), code=code)
