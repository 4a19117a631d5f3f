"""Tracker interface: an experiment tracker that receives the metrics of a run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from penstock.core.extensions import Part
from penstock.train.trackers.run_info import RunInfo

Ending = Literal["finished", "stopped"]

ResumeState = dict[str, Any]
"""Resume state of a tracker for the same run in another process; JSON, stored on disk. Its `url`,
if any, is where users find the run."""


class Tracker(Protocol):
    """One run at one tracker. May raise anything: the caller retries or gives up."""

    def log(self, step: int, values: Mapping[str, float], timestamp: float) -> None:
        """Log the values of a step, with its time in seconds since the epoch."""

    def close(self, ending: Ending) -> None:
        """Flush and close. A stopped run may be resumed later."""


StartRun = Callable[[RunInfo, ResumeState], Tracker]
"""Create a run, or resume the one in the resume state; store its id there."""


class PackageTracker(Part, ABC):
    """A tracker of a package (`penstock.trackers`), with its options as fields. It has a process of
    its own, to which `launch.pass_env` passes credentials."""

    @abstractmethod
    def start_run(self, run_info: RunInfo, state: ResumeState) -> Tracker:
        """See `StartRun`."""
