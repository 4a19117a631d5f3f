"""Worker loop: rank 0 receives commands and broadcasts them, all ranks run them, rank 0 replies.

A command succeeds or fails on all ranks. After an expected error the ranks are still in sync; after
any other error their state is undefined, so they exit and are restarted.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec.structs import replace

from penstock.core.errors import PenstockError
from penstock.engine.distributed.broadcast import ControlBroadcast
from penstock.server.protocol.codec import Code, Codec, FrameError, PeerLostError, error_category
from penstock.server.protocol.worker_commands import (
    Command,
    CommandFailure,
    FromWorkers,
    Hello,
    Ready,
    Reply,
    Shutdown,
    ToWorkers,
    WeightSyncCommand,
    WorkerOperation,
)
from penstock.server.worker.errors import error_code
from penstock.server.worker.handlers import Result

IDLE_SECONDS = 5.0
"""Interval of rank 0's idle broadcasts, so that other ranks do not time out."""

log = logging.getLogger("penstock.server.worker")


class UnrecoverableError(RuntimeError):
    """An unexpected error: the ranks must be restarted."""


@dataclass
class CurrentCommand:
    """The current command, for status queries."""

    id: str = ""


class ChannelEnd(Protocol):
    """Rank 0's end of the channel."""

    def receive(self, timeout: float | None = None) -> ToWorkers | None:
        """The next message; None on timeout. Raises PeerLostError once per loss of the
        scheduler."""
        ...

    def send(self, message: FromWorkers) -> None:
        """Send the message. Raises FrameError for one that is too large."""
        ...


class CommandHandler(Protocol):
    """Runs commands on this rank, as `CommandHandlers` does."""

    def do(self, order: WorkerOperation) -> Result:
        """Raises PenstockError if the command fails."""
        ...


class _RankError(msgspec.Struct, frozen=True):
    """The error of a command on one rank."""

    error: str
    code: Code


_WRONG = Codec[_RankError](_RankError)
_COMMANDS = Codec[ToWorkers](ToWorkers)


def serve(
    operations: CommandHandler,
    announcing: ControlBroadcast,
    end: ChannelEnd | None = None,
    ready: Callable[[], Ready] | None = None,
    running: CurrentCommand | None = None,
) -> None:
    """Run commands until the scheduler sends Shutdown. Only rank 0 has `end`, `ready` and
    `running`.

    Raises BrokenError once the ranks' state may differ; the scheduler has been told.
    """
    while True:
        message = _next(end, ready) if end and ready else None
        frame = announcing.broadcast(_announced(message))
        if not frame:
            continue
        message = message or _COMMANDS.decode(frame)
        if isinstance(message, Shutdown):
            return
        assert isinstance(message, Command)
        running = running or CurrentCommand()
        running.id = message.id
        outcome = carry_out(message, operations, announcing)
        running.id = ""
        _tell(end, outcome.said)
        if outcome.broke:
            raise UnrecoverableError(outcome.broke)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a command, the same on all ranks except for rank 0's result."""

    said: Reply | CommandFailure
    broke: str = ""
    """Why the ranks cannot continue; empty: they can."""


def carry_out(
    command: Command, operations: CommandHandler, announcing: ControlBroadcast
) -> Outcome:
    """Run it on this rank, and agree on the outcome with the other ranks."""
    result: Result | None = None
    wrong: _RankError | None = None
    try:
        result = operations.do(command.operation)
    except PenstockError as error:
        wrong = _RankError(str(error), error_code(error))
    except Exception as error:
        # No agreement: other ranks may be blocked elsewhere until this rank exits.
        log.exception("%s failed", type(command.operation).__name__)
        why = f"{type(error).__name__}: {error}"
        told = (
            f"the workers failed: {why}\n  They are started again, with every model as it was "
            "saved last."
        )
        return Outcome(_fault(command.id, _RankError(told, "internal"), ends=True), why)
    found = announcing.all_gather_errors(None if wrong is None else _WRONG.encode(wrong))
    faults = [_WRONG.decode(frame) for frame in found if frame is not None]
    if faults:
        return Outcome(_fault(command.id, faults[0]))
    assert result is not None
    return Outcome(Reply(id=command.id, result=result))


def _fault(number: str, wrong: _RankError, *, ends: bool = False) -> CommandFailure:
    return CommandFailure(
        id=number,
        error=wrong.error,
        category=error_category(wrong.code),
        code=wrong.code,
        needs_restart=ends,
    )


def _next(end: ChannelEnd, ready: Callable[[], Ready]) -> ToWorkers | None:
    """The message to broadcast; None if there is nothing for the other ranks."""
    try:
        message = end.receive(IDLE_SECONDS)
    except PeerLostError as error:
        log.warning("%s; models stay, and the engine that comes next finds them", error)
        return None
    if isinstance(message, Hello):
        end.send(ready())
        return None
    return message


def _announced(message: ToWorkers | None) -> bytes:
    """The message for the other ranks without the keys of inference servers: only rank 0 needs
    them, and the broadcast may be unencrypted."""
    if message is None:
        return b""
    if isinstance(message, Command) and isinstance(message.operation, WeightSyncCommand):
        message = replace(message, order=replace(message.operation, api_keys=()))
    return _COMMANDS.encode(message)


def _tell(end: ChannelEnd | None, said: Reply | CommandFailure) -> None:
    if end is None:
        return
    try:
        end.send(said)
    except FrameError as error:
        end.send(CommandFailure(id=said.id, error=str(error), category="user", code="invalid"))
