"""What a dry run records: launches, collectives, waits and host syncs, in the order of the host.

A trace has no times: `timeline.py` replays it with the streams' own order. Names of places are
`package/file.py:line function` of the innermost frame of Penstock.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal, get_args

import penstock_kernels
from penstock.estimate.dryrun.achieved import ACHIEVED, OperatorClass, Work
from penstock.estimate.dryrun.operators import classify

Phase = str
"""As the engine reports it to its heartbeat: forward, backward, update, ..."""

HOST_SECONDS: Mapping[str, float] = {"kernel": 6e-6, "triton": 15e-6, "copy": 8e-6}
"""Time of the host for one eager launch, with autograd and PyTorch's dispatcher."""

_ROOTS = tuple(f"{folder}/" for folder in (Path(__file__).parents[2], *penstock_kernels.__path__))
_OWN = str(Path(__file__).parent) + "/"
_MODELS = f"{_ROOTS[0]}models/"
_TORCH = "site-packages/torch/"
_DISPATCH = (
    *("torch/utils/", "torch/_subclasses", "torch/_ops", "torch/_dynamo/", "torch/_compile"),
    *("torch/distributed/distributed_c10d", "torch/distributed/c10d_logger"),
)
"""Frames between an operator and the code that calls it."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel or an asynchronous copy on a stream."""

    stream: int
    name: str
    seconds: float
    """Time on the device, by the roofline."""
    host_seconds: float
    """Time that the host needs to launch it."""
    phase: Phase
    call_site: str
    kind: Literal["kernel", "triton", "copy"] = "kernel"
    operators: OperatorClass | None = None
    """Class of a kernel; None for a copy."""
    compute: float = 0.0
    """Time of its FLOPs at a data sheet's rate."""
    traffic: float = 0.0
    """Time of its bytes at a data sheet's rate."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective, send or receive of a process group."""

    stream: int
    """The stream it runs on: the current one, or the group's own if `is_async`."""
    name: str
    group: str
    """Name of the process group."""
    ranks: tuple[int, ...]
    dtype: str
    num_bytes: int
    """Bytes of the largest tensor of this rank."""
    shape: tuple[int, ...]
    seconds: float
    phase: Phase
    call_site: str
    peer: int | None = None
    """The other rank of a send or receive."""


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """A CUDA event recorded on a stream."""

    stream: int
    event: int


@dataclass(frozen=True, slots=True)
class WaitEvent:
    """A stream that waits for an event."""

    stream: int
    event: int


@dataclass(frozen=True, slots=True)
class HostSync:
    """The host waits for the device: for an event, or for a stream."""

    call: str
    call_site: str
    phase: Phase
    stream: int | None
    event: int | None = None


Record = Launch | Collective | RecordEvent | WaitEvent | HostSync


def records_from_json(values: Iterable[Sequence[Any]]) -> list[Record]:
    """The records that `Trace.as_json` returned."""
    kinds = {kind.__name__: kind for kind in get_args(Record)}
    records = (kinds[name](*fields) for name, *fields in values)
    return [
        replace(record, ranks=tuple(record.ranks), shape=tuple(record.shape))
        if isinstance(record, Collective)
        else record
        for record in records
    ]


@dataclass
class Trace:
    """The records of one step, and the faults that were found in it."""

    records: list[Record] = field(default_factory=list)
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How often each (fault, place) occurred."""
    phase: Phase = ""

    def add(self, record: Record) -> None:
        """Append a record."""
        self.records.append(record)

    def launch(self, stream: int, name: str, work: Work, kind: Literal["kernel", "triton"]) -> None:
        """Record a kernel at the current place."""
        call_site = place()
        operators = classify(name, work.compute > 0, self.phase, call_site)
        seconds = work.seconds(ACHIEVED[operators])
        numbers = operators, work.compute, work.traffic
        host_seconds = HOST_SECONDS[kind]
        self.add(Launch(stream, name, seconds, host_seconds, self.phase, call_site, kind, *numbers))

    def copy(self, stream: int, name: str, seconds: float) -> None:
        """Record a copy between host and device at the current place."""
        self.add(Launch(stream, name, seconds, HOST_SECONDS["copy"], self.phase, place(), "copy"))

    def fault(self, message: str) -> None:
        """Count a fault at the current place."""
        self.faults[message, place()] += 1

    def sync(self, call: str, stream: int | None, event: int | None = None) -> None:
        """Record that the host waits."""
        self.add(HostSync(call, place(), self.phase, stream, event))

    def clear(self) -> None:
        """Forget the records so far; faults stay."""
        self.records.clear()

    def as_json(self) -> list[list[Any]]:
        """The records as lists: the type, then its fields."""
        return [[type(record).__name__, *astuple(record)] for record in self.records]


def place() -> str:
    """The innermost frame of Penstock; without one, the innermost of PyTorch."""
    own, library = places()
    return own or library or "autograd"


def places() -> tuple[str, str]:
    """The innermost frame of Penstock, and the innermost of PyTorch inside it; empty if none."""
    library = ""
    # traceback.extract_stack is a hundred times slower.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        root = next((root for root in _ROOTS if file.startswith(root)), None)
        if root and not file.startswith(_OWN):
            prefix = "kernels/" if root == _ROOTS[1] else ""
            return f"{prefix}{_name(frame, file.removeprefix(root))}", library
        if not root and not library and _TORCH in file:
            short = "torch/" + file.partition(_TORCH)[2]
            if not short.startswith(_DISPATCH):
                library = _name(frame, short)
        frame = frame.f_back
    return "", library


def is_forward() -> bool:
    """Whether a layer of the model is being called: in a backward pass, to recompute it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_MODELS):
        frame = frame.f_back
    return frame is not None


def _name(frame: FrameType, file: str) -> str:
    return f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
