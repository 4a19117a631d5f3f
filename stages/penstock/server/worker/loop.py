"""Worker loop: rank 0 receives commands and broadcasts them, all ranks run them, rank 0 replies.

A command succeeds or fails on all ranks. After an expected error the ranks are still in sync; after
any other error their state is undefined, so they exit and are restarted.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from penstock.core.errors import PenstockError
from penstock.core.os_errors import describe_os_error, is_full_disk
from penstock.engine.distributed.broadcast import ControlBroadcast
from penstock.server.protocol.codec import Code, Codec, FrameError, PeerLostError, error_category
from penstock.server.protocol.worker_commands import (
    Command,
    CommandFailure,
    FromWorkers,
    Hello,
    Ready,
    Reply,
    Result,
    Shutdown,
    ToWorkers,
    WeightSyncCommand,
    WorkerOperation,
)
from penstock.server.worker.errors import error_code

IDLE_SECONDS = 5.0  # Interval of rank 0's idle broadcasts, so that other ranks do not time out

log = logging.getLogger("penstock.server.worker")


class UnrecoverableError(RuntimeError):
    """An unexpected error: the ranks must be restarted."""


class ChannelEnd(Protocol):
    """Rank 0's end of the channel (`ThreadedEnd`)."""

    def receive(self, timeout: float | None = None) -> ToWorkers | None: ...

    def send(self, message: FromWorkers) -> None: ...


class CommandHandler(Protocol):
    """Runs commands on this rank, as `CommandHandlers` does. Raises PenstockError."""

    def do(self, command: WorkerOperation, /) -> Result: ...


_FAILURES = Codec[CommandFailure](CommandFailure)
_COMMANDS = Codec[ToWorkers](ToWorkers)


def serve(
    handlers: CommandHandler,
    broadcast: ControlBroadcast,
    end: ChannelEnd | None = None,
    ready: Callable[[], Ready] | None = None,
) -> None:
    """Run commands until the scheduler sends Shutdown. Only rank 0 has `end` and `ready`. Raises
    UnrecoverableError once the ranks' state may differ; the error has been sent to the
    scheduler."""
    while True:
        message = _receive(end, ready) if end and ready else None
        frame = broadcast.broadcast(_encode_without_keys(message))
        if not frame:
            continue
        message = message or _COMMANDS.decode(frame)
        if isinstance(message, Shutdown):
            return
        assert isinstance(message, Command)
        outcome = run_command(message, handlers, broadcast)
        if end is not None:
            try:
                end.send(outcome.reply)
            except FrameError as error:
                end.send(_to_failure(message, str(error), "invalid"))
        if outcome.unrecoverable:
            raise UnrecoverableError(outcome.unrecoverable)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a command, the same on all ranks except for rank 0's result."""

    reply: Reply | CommandFailure
    unrecoverable: str = ""  # Why the ranks cannot continue; empty: they can


def run_command(command: Command, handlers: CommandHandler, broadcast: ControlBroadcast) -> Outcome:
    """Run it on this rank, and agree on the outcome with the other ranks."""
    result: Result | None = None
    failure: CommandFailure | None = None
    try:
        result = handlers.do(command.operation)
    except PenstockError as error:
        failure = _to_failure(command, str(error), error_code(error))
    except Exception as error:
        # No agreement: other ranks may be blocked elsewhere until this rank exits.
        log.exception("%s failed", type(command.operation).__name__)
        is_full = is_full_disk(error)
        why = describe_os_error(error) if is_full else f"{type(error).__name__}: {error}"
        message = (
            f"the workers failed: {why}\n  They are restarted, with every model as it was saved "
            "last."
        )
        failure = _to_failure(command, message, "storage_limit" if is_full else "internal")
        return Outcome(replace(failure, needs_restart=True), why)
    frames = broadcast.all_gather_errors(None if failure is None else _FAILURES.encode(failure))
    failures = [_FAILURES.decode(frame) for frame in frames if frame is not None]
    if failures:
        return Outcome(failures[0])
    assert result is not None
    return Outcome(Reply(id=command.id, result=result))


def _to_failure(command: Command, error: str, code: Code) -> CommandFailure:
    return CommandFailure(id=command.id, error=error, category=error_category(code), code=code)


def _receive(end: ChannelEnd, ready: Callable[[], Ready]) -> ToWorkers | None:
    """The message to broadcast; None if there is nothing for the other ranks."""
    try:
        message = end.receive(IDLE_SECONDS)
    except PeerLostError as error:
        log.warning("%s; models stay loaded for the next scheduler", error)
        return None
    if isinstance(message, Hello):
        end.send(ready())
        return None
    return message


def _encode_without_keys(message: ToWorkers | None) -> bytes:
    if message is None:
        return b""
    if isinstance(message, Command) and isinstance(message.operation, WeightSyncCommand):
        # Only rank 0 needs the keys of inference servers, and the broadcast may be unencrypted.
        message = replace(message, operation=replace(message.operation, api_keys=()))
    return _COMMANDS.encode(message)
