"""Generation loop: a GenerateCommand, and those that arrive for the same weights before all are
finished (continuous batching)."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

from penstock.core.errors import PenstockError
from penstock.engine.distributed.broadcast import ControlBroadcast
from penstock.engine.generation.run import GenerationRequest
from penstock.server.protocol.codec import Codec
from penstock.server.protocol.worker_commands import Arrivals, Command, GenerateCommand, Reply
from penstock.server.worker.generate import RunningGeneration
from penstock.server.worker.outcome import Outcome, agree, failure_of, unrecoverable

log = logging.getLogger("penstock.server.worker")

_ARRIVALS = Codec[Arrivals](Arrivals)


@dataclass
class GenerationLoop:
    """Runs on every rank."""

    start: Callable[[GenerateCommand], AbstractContextManager[RunningGeneration]]
    broadcast: ControlBroadcast
    arrivals: Callable[[Callable[[GenerateCommand], bool]], Sequence[Command]]
    """The commands that have arrived on this rank and may join, by this criterion."""
    reply: Callable[[Command, Outcome], None]
    """Called for each command once it is finished."""
    _running: dict[GenerationRequest, Command] = field(default_factory=dict, init=False)
    _unfinished: dict[str, Command] = field(default_factory=dict, init=False)
    """By id: also those that are not added yet."""

    def run(self, first: Command) -> str:
        """Run until no command is left. Returns why the ranks cannot continue; empty: they can."""
        self._unfinished[first.id] = first
        try:
            with ExitStack() as stack:
                generation = agree(
                    first,
                    lambda: stack.enter_context(self.start(_operation(first))),
                    self.broadcast,
                )
                if isinstance(generation, Outcome):
                    self._finish(first, generation)
                    return generation.unrecoverable
                self._add([first], generation)
                while self._running:
                    self._add(self._step(generation), generation)
        except Exception as error:
            log.exception("generation failed")
            for command in self._unfinished.values():
                self.reply(command, unrecoverable(command, error))
            return unrecoverable(first, error).unrecoverable
        return ""

    def _add(self, commands: Sequence[Command], generation: RunningGeneration) -> None:
        self._unfinished |= {command.id: command for command in commands}
        for command in commands:
            try:
                self._running[generation.add(_operation(command))] = command
            except PenstockError as error:
                # An invalid prompt is one on all ranks.
                self._finish(command, Outcome(failure_of(command, error)))

    def _step(self, generation: RunningGeneration) -> Sequence[Command]:
        """Run one pass, and return the commands that join after it."""
        arrivals = self.arrivals(generation.may_join)
        finished, has_arrivals = generation.run.step(has_arrivals=bool(arrivals))
        for request in finished:
            command = self._running.pop(request)
            try:
                reply = Reply(id=command.id, result=generation.result(request))
            except PenstockError as error:
                reply = failure_of(command, error)
            self._finish(command, Outcome(reply))
        if not has_arrivals:
            return ()
        frame = _ARRIVALS.encode(Arrivals(commands=tuple(arrivals)))
        return _ARRIVALS.decode(self.broadcast.broadcast(frame)).commands

    def _finish(self, command: Command, outcome: Outcome) -> None:
        del self._unfinished[command.id]
        self.reply(command, outcome)


def _operation(command: Command) -> GenerateCommand:
    assert isinstance(command.operation, GenerateCommand)
    return command.operation
