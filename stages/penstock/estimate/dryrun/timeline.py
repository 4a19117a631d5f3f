"""Replay of traces: when each launch and collective runs, and what the device waits for.

The host issues records in order and runs ahead of the device until it syncs. Each stream is a
queue: its head runs once the host has issued it and the events before it have passed. The ranks of
a collective are taken to arrive together. A receive starts when its peer's send does, if the peer
is replayed too; a send does not wait for its peer.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.estimate.dryrun.fake_cuda import DEFAULT_STREAM
from penstock.estimate.dryrun.trace import (
    Collective,
    HostSync,
    Launch,
    Record,
    RecordEvent,
    WaitEvent,
)

EVENT_SECONDS = 1e-6
"""Time of the host to record an event, or to make a stream wait for one."""

COLLECTIVE_SECONDS = 20e-6
"""Time of the host to issue a collective."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that runs on a stream from `start` to `end`, in seconds."""

    start: float
    end: float
    stream: int
    record: Launch | Collective


@dataclass
class Timeline:
    """One rank's step."""

    spans: list[Span] = field(default_factory=list)
    exposed: list[tuple[Collective, float]] = field(default_factory=list)
    """Collectives that the default stream waits for with nothing else to run, and the seconds."""
    host_bound: float = 0.0
    """Seconds for which the default stream waits for the host to issue something."""

    @property
    def seconds(self) -> float:
        """The end of the last launch or collective; the step begins at 0."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def compute_seconds(self) -> float:
        """Seconds for which kernels run on the default stream."""
        spans = (s for s in self.spans if s.stream == DEFAULT_STREAM)
        return sum(s.end - s.start for s in spans if isinstance(s.record, Launch))

    @property
    def exposed_seconds(self) -> float:
        """Seconds of exposed communication."""
        return sum(seconds for _, seconds in self.exposed)


def replay(traces: Mapping[int, Sequence[Record]]) -> dict[int, Timeline]:
    """Replay the traces of several ranks together, by rank.

    Raises ValueError if the ranks wait for one another.
    """
    sends: dict[tuple[int, int], deque[float]] = defaultdict(deque)
    ranks = {rank: _Replay(rank, records, sends, set(traces)) for rank, records in traces.items()}
    while any(not rank.is_done for rank in ranks.values()):
        # Every rank advances, not only the first that can.
        advanced = [rank.advance() for rank in ranks.values()]
        if not any(advanced):
            raise ValueError(
                "these ranks wait for one another: "
                + ", ".join(str(number) for number, rank in ranks.items() if not rank.is_done)
            )
    return {number: rank.timeline for number, rank in ranks.items()}


@dataclass
class _Stream:
    queue: deque[tuple[Record, float]] = field(default_factory=deque)
    """Records with the time at which the host issued them."""
    clock: float = 0.0
    waited_for: Collective | None = None
    """The collective whose end set the clock; None if a kernel did."""


class _Replay:
    """The host and the streams of one rank."""

    def __init__(
        self,
        rank: int,
        records: Sequence[Record],
        sends: dict[tuple[int, int], deque[float]],
        replayed: set[int],
    ) -> None:
        self.rank, self.records = rank, records
        self.sends, self.replayed = sends, replayed
        self.timeline = Timeline()
        self.at, self.clock = 0, 0.0
        self.streams: dict[int, _Stream] = defaultdict(_Stream)
        self.events: dict[int, tuple[float, Collective | None]] = {}
        self.last_end = 0.0
        """When the default stream last ran something."""

    @property
    def is_done(self) -> bool:
        return self.at == len(self.records) and not self._num_queued()

    def advance(self) -> bool:
        """Issue and run as much as possible; False if nothing was possible."""
        before = self.at, self._num_queued()
        self._run_streams()
        while self.at < len(self.records) and self._issue(self.records[self.at]):
            self.at += 1
        return before != (self.at, self._num_queued())

    def _num_queued(self) -> int:
        return sum(len(stream.queue) for stream in self.streams.values())

    def _issue(self, record: Record) -> bool:
        """The host issues a record; False if it waits for the device, which waits for a peer."""
        if isinstance(record, HostSync):
            return self._sync(record)
        if isinstance(record, Launch):
            self.clock += record.host_seconds
        else:
            self.clock += COLLECTIVE_SECONDS if isinstance(record, Collective) else EVENT_SECONDS
        self.streams[record.stream].queue.append((record, self.clock))
        self._run_streams()
        return True

    def _sync(self, record: HostSync) -> bool:
        if record.event is not None:
            if record.event not in self.events:
                return False
            self.clock = max(self.clock, self.events[record.event][0])
            return True
        streams = self.streams
        waits_for = streams.values() if record.stream is None else [streams[record.stream]]
        if any(stream.queue for stream in waits_for):
            return False
        self.clock = max([self.clock, *(stream.clock for stream in waits_for)])
        return True

    def _run_streams(self) -> None:
        progress = True
        while progress:
            progress = False
            for number, stream in self.streams.items():
                while stream.queue and self._run(number, stream, *stream.queue[0]):
                    stream.queue.popleft()
                    progress = True

    def _run(self, number: int, stream: _Stream, record: Record, issued: float) -> bool:
        """Run the head of a stream; False if it waits for an event or a peer."""
        if isinstance(record, RecordEvent):
            # The event passes when all that was queued before it has ended.
            self.events[record.event] = max(stream.clock, issued), stream.waited_for
            return True
        if isinstance(record, WaitEvent):
            if record.event not in self.events:
                return False
            passed, collective = self.events[record.event]
            if passed > stream.clock:
                stream.clock, stream.waited_for = passed, collective
            return True
        assert isinstance(record, Launch | Collective)
        ready = max(stream.clock, issued)
        start = ready
        if isinstance(record, Collective) and record.peer in self.replayed:
            if record.name == "send":
                self.sends[self.rank, record.peer].append(start)
            else:
                if not self.sends[record.peer, self.rank]:
                    return False
                start = max(start, self.sends[record.peer, self.rank].popleft())
        if number == DEFAULT_STREAM:
            self._account(stream, issued)
        stream.clock = start + record.seconds
        stream.waited_for = record if isinstance(record, Collective) else None
        self.timeline.spans.append(Span(start, stream.clock, number, record))
        if number == DEFAULT_STREAM:
            self.last_end = stream.clock
        if number == DEFAULT_STREAM and isinstance(record, Collective):
            # On the stream of the kernels nothing overlaps with it.
            self._expose(record, stream.clock - ready)
            stream.waited_for = None
        return True

    def _account(self, stream: _Stream, issued: float) -> None:
        """Why the default stream was idle before its next launch."""
        ended = self.last_end
        if stream.waited_for and stream.clock > max(ended, issued):
            self._expose(stream.waited_for, stream.clock - max(ended, issued))
        self.timeline.host_bound += max(0.0, issued - max(ended, stream.clock))

    def _expose(self, collective: Collective, seconds: float) -> None:
        self.timeline.exposed.append((collective, seconds))
