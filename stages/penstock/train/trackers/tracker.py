"""What a tracker is: somebody else's place for the numbers of a run."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from penstock.train.trackers.run_info import RunInfo

Ending = Literal["finished", "stopped"]

Memory = dict[str, Any]
"""What a tracker must know to go on with the same run in another process; JSON, kept on disk. Its
`url`, where it has one, is where people look for the run."""


class Tracker(Protocol):
    """One run at one tracker. Anything may be raised: who calls it tries again, or gives up."""

    def tell(self, step: int, values: Mapping[str, float], at: float) -> None:
        """The values of a step, known at that time (seconds since the epoch)."""

    def close(self, ending: Ending) -> None:
        """Hand over what waits. A run that was stopped may go on later."""


Begin = Callable[[RunInfo, Memory], Tracker]
"""Begin a run there, or go on with the one that the memory names; note its name in the memory."""
