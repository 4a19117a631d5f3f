"""TensorBoard tracker: event files in a folder."""

# pyright: reportMissingImports=false

from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from penstock.train.trackers.run_info import RunInfo
from penstock.train.trackers.tracker import Ending, ResumeState, Tracker


def start_run(run_info: RunInfo, state: ResumeState) -> Tracker:
    """See `StartRun`. A new event file continues the existing ones."""
    last_step = max([0, *state.get("told", {}).values()])
    return _EventFiles(EventFileWriter(str(run_info.tensorboard_dir)), last_step)


class _EventFiles:
    def __init__(self, writer: EventFileWriter, last_step: int) -> None:
        self._writer = writer
        # A killed process may have logged more than it recorded: readers drop those steps.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(step=last_step + 1, session_log=start))

    def log(self, step: int, values: Mapping[str, float], timestamp: float) -> None:
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(
            Event(wall_time=timestamp, step=step, summary=Summary(value=scalars))
        )
        self._writer.flush()

    def close(self, ending: Ending) -> None:  # noqa: ARG002 - event files have no status
        self._writer.close()
