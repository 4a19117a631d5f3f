"""trackio tracker: its local database, which `trackio show` displays."""

# pyright: reportMissingImports=false

from collections.abc import Mapping

import trackio

from penstock.train.trackers.run_info import RunInfo
from penstock.train.trackers.tracker import Ending, ResumeState, Tracker


def start_run(run_info: RunInfo, state: ResumeState) -> Tracker:
    """See `StartRun`. trackio identifies runs by name, so the name has a part of the run's key."""
    state.setdefault("id", f"{run_info.name}-{run_info.key[:8]}")
    run = trackio.init(
        project=run_info.project,
        name=state["id"],
        config=dict(run_info.settings),
        resume="allow",
        # A notebook's cell is the user's, not the dashboard's.
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return _Run(run)


class _Run:
    def __init__(self, run: trackio.Run) -> None:
        self._run = run

    def log(self, step: int, values: Mapping[str, float], timestamp: float) -> None:  # noqa: ARG002 - trackio sets the time
        self._run.log(dict(values), step=step)

    def close(self, ending: Ending) -> None:  # noqa: ARG002 - not supported by trackio
        self._run.finish()
