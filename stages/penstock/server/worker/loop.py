"""The workers' loop: rank 0 hears the engine, all ranks do what it says, rank 0 replies.

A command is done on all ranks or failed on all. One that failed as it may leaves the ranks in step;
after any other failure nobody knows what they hold, so they end, and are started again.
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
    Fault,
    FromWorkers,
    Hello,
    Order,
    Ready,
    Reply,
    Shutdown,
    ToWorkers,
    WeightSyncCommand,
)
from penstock.server.worker.errors import error_code
from penstock.server.worker.handlers import Result

IDLE_SECONDS = 5.0
"""How often rank 0 says that there is nothing to do, so that no other rank waits too long."""

log = logging.getLogger("penstock.server.worker")


class BrokenError(RuntimeError):
    """A command failed in a way that none may: the ranks are to be started again."""


@dataclass
class CurrentCommand:
    """What is being done, for whoever asks meanwhile."""

    id: str = ""


class ChannelEnd(Protocol):
    """Rank 0's end of the channel."""

    def receive(self, timeout: float | None = None) -> ToWorkers | None:
        """The next message; None where none came in time. Raises PeerLostError once whenever the
        engine is gone."""
        ...

    def send(self, message: FromWorkers) -> None:
        """Hand the message over. Raises FrameError for one that is too large."""
        ...


class CommandHandler(Protocol):
    """What carries out orders on this rank, as `Operations` does."""

    def do(self, order: Order) -> Result:
        """Raises PenstockError where the order cannot be carried out."""
        ...


class _Wrong(msgspec.Struct, frozen=True):
    """How a command failed on one rank."""

    error: str
    code: Code


_WRONG = Codec[_Wrong](_Wrong)
_COMMANDS = Codec[ToWorkers](ToWorkers)


def serve(
    operations: CommandHandler,
    announcing: ControlBroadcast,
    end: ChannelEnd | None = None,
    ready: Callable[[], Ready] | None = None,
    running: CurrentCommand | None = None,
) -> None:
    """Do what the engine says until it says to leave. `end`, `ready` and `running` are rank 0's,
    which alone has them.

    Raises BrokenError once what ranks hold may differ; the engine has been told.
    """
    while True:
        message = _next(end, ready) if end and ready else None
        frame = announcing.heard(_announced(message))
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
            raise BrokenError(outcome.broke)


@dataclass(frozen=True)
class Outcome:
    """How a command ended, alike on all ranks but for what only rank 0 was to know."""

    said: Reply | Fault
    broke: str = ""
    """Why the ranks cannot go on; empty: they can."""


def carry_out(
    command: Command, operations: CommandHandler, announcing: ControlBroadcast
) -> Outcome:
    """Do it on this rank, and agree with the others on how it went."""
    result: Result | None = None
    wrong: _Wrong | None = None
    try:
        result = operations.do(command.order)
    except PenstockError as error:
        wrong = _Wrong(str(error), error_code(error))
    except Exception as error:
        # Nothing is agreed on: the others may wait for this rank elsewhere, until it ends.
        log.exception("%s failed", type(command.order).__name__)
        why = f"{type(error).__name__}: {error}"
        told = (
            f"the workers failed: {why}\n  They are started again, with every model as it was "
            "saved last."
        )
        return Outcome(_fault(command.id, _Wrong(told, "internal"), ends=True), why)
    found = announcing.agreed(None if wrong is None else _WRONG.encode(wrong))
    faults = [_WRONG.decode(frame) for frame in found if frame is not None]
    if faults:
        return Outcome(_fault(command.id, faults[0]))
    assert result is not None
    return Outcome(Reply(id=command.id, result=result))


def _fault(number: str, wrong: _Wrong, *, ends: bool = False) -> Fault:
    return Fault(
        id=number,
        error=wrong.error,
        category=error_category(wrong.code),
        code=wrong.code,
        ends=ends,
    )


def _next(end: ChannelEnd, ready: Callable[[], Ready]) -> ToWorkers | None:
    """What all ranks are to hear; None where there is nothing for them."""
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
    """What the other ranks are told, of whom none speaks to inference servers: no keys of theirs,
    for other machines may be reached in clear."""
    if message is None:
        return b""
    if isinstance(message, Command) and isinstance(message.order, WeightSyncCommand):
        message = replace(message, order=replace(message.order, api_keys=()))
    return _COMMANDS.encode(message)


def _tell(end: ChannelEnd | None, said: Reply | Fault) -> None:
    if end is None:
        return
    try:
        end.send(said)
    except FrameError as error:
        end.send(Fault(id=said.id, error=str(error), category="user", code="invalid"))
