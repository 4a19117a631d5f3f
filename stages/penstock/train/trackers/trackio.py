"""trackio tracker: its local database, which `trackio show` displays."""

# pyright: reportMissingImports=false

from collections.abc import Mapping

import trackio

from penstock.train.trackers.run_info import RunInfo
from penstock.train.trackers.tracker import Ending, Memory, Tracker


def begin(card: RunInfo, memory: Memory) -> Tracker:
    """See `Begin`. trackio identifies runs by name, so another run of the same name gets a part of
    its key appended."""
    memory.setdefault("id", f"{card.name}-{card.key[:8]}")
    run = trackio.init(
        project=card.project,
        name=memory["id"],
        config=dict(card.settings),
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return _Run(run)


class _Run:
    def __init__(self, run: trackio.Run) -> None:
        self._run = run

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:  # noqa: ARG002 - trackio sets the time
        self._run.log(dict(values), step=step)

    def close(self, ending: Ending) -> None:  # noqa: ARG002 - not supported by trackio
        self._run.finish()
