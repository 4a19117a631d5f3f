"""Worker loop: rank 0 receives commands and broadcasts them, all ranks run them, rank 0 replies.
GenerateCommands join one that runs, between its passes.

A command succeeds or fails on all ranks. After an expected error the ranks are still in sync; after
any other error their state is undefined, so they exit and are restarted.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from msgspec.structs import replace

from penstock.engine.distributed.broadcast import ControlBroadcast
from penstock.server.protocol.codec import Codec, FrameError, PeerLostError
from penstock.server.protocol.worker_commands import (
    Command,
    FromWorkers,
    GenerateCommand,
    Hello,
    Ready,
    Reply,
    Result,
    Shutdown,
    ToWorkers,
    WeightSyncCommand,
    WorkerOperation,
)
from penstock.server.worker.generate import RunningGeneration
from penstock.server.worker.generation_loop import GenerationLoop
from penstock.server.worker.outcome import Outcome, agree, to_failure

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

    def generating(
        self, command: GenerateCommand, /
    ) -> AbstractContextManager[RunningGeneration]: ...


_COMMANDS = Codec[ToWorkers](ToWorkers)


class Inbox:
    """What rank 0 receives from the scheduler."""

    def __init__(self, end: ChannelEnd, ready: Callable[[], Ready]) -> None:
        self._end, self._ready = end, ready
        self._postponed: ToWorkers | None = None

    def receive(self) -> ToWorkers | None:
        """The next message to broadcast; None if there is nothing for the other ranks."""
        message, self._postponed = self._postponed or self._poll(IDLE_SECONDS), None
        if isinstance(message, Hello):
            self._end.send(self._ready())
            return None
        return message

    def arrivals(self, may_join: Callable[[GenerateCommand], bool]) -> list[Command]:
        """The commands that have arrived since and may join the running one: those before the first
        that may not, so that none is overtaken for ever."""
        commands: list[Command] = []
        while self._postponed is None and (message := self._poll(0)) is not None:
            match message:
                case Command(operation=GenerateCommand() as operation) if may_join(operation):
                    commands.append(message)
                case _:
                    self._postponed = message
        return commands

    def _poll(self, seconds: float) -> ToWorkers | None:
        try:
            return self._end.receive(seconds)
        except PeerLostError as error:
            log.warning("%s; models stay loaded for the next scheduler", error)
            return None


def serve(
    handlers: CommandHandler,
    broadcast: ControlBroadcast,
    end: ChannelEnd | None = None,
    ready: Callable[[], Ready] | None = None,
) -> None:
    """Run commands until the scheduler sends Shutdown. Only rank 0 has `end` and `ready`. Raises
    UnrecoverableError once the ranks' state may differ; the error has been sent to the
    scheduler."""
    inbox = Inbox(end, ready) if end and ready else None

    def reply(command: Command, outcome: Outcome) -> None:
        if end is not None:
            try:
                end.send(outcome.reply)
            except FrameError as error:
                end.send(to_failure(command, str(error), "invalid"))

    while True:
        message = inbox.receive() if inbox else None
        frame = broadcast.broadcast(_encode_without_keys(message))
        if not frame:
            continue
        message = message or _COMMANDS.decode(frame)
        if isinstance(message, Shutdown):
            return
        assert isinstance(message, Command)
        if isinstance(message.operation, GenerateCommand):
            arrivals = inbox.arrivals if inbox else _no_arrivals
            loop = GenerationLoop(handlers.generating, broadcast, arrivals, reply)
            why = loop.run(message)
        else:
            outcome = run_command(message, handlers, broadcast)
            reply(message, outcome)
            why = outcome.unrecoverable
        if why:
            raise UnrecoverableError(why)


def run_command(command: Command, handlers: CommandHandler, broadcast: ControlBroadcast) -> Outcome:
    """Run it on this rank, and agree on the outcome with the other ranks."""
    result = agree(command, lambda: handlers.do(command.operation), broadcast)
    return result if isinstance(result, Outcome) else Outcome(Reply(id=command.id, result=result))


def _no_arrivals(_: object) -> Sequence[Command]:
    return ()


def _encode_without_keys(message: ToWorkers | None) -> bytes:
    if message is None:
        return b""
    if isinstance(message, Command) and isinstance(message.operation, WeightSyncCommand):
        # Only rank 0 needs the keys of inference servers, and the broadcast may be unencrypted.
        message = replace(message, operation=replace(message.operation, api_keys=()))
    return _COMMANDS.encode(message)
