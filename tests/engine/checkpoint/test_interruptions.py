"""A run that is interrupted wherever it hurts, again and again: what it had saved is there, each
step is told once, and it ends as one that nobody interrupted."""

import os
import pathlib
import signal
from itertools import cycle

import pytest

from penstock.engine.checkpoint import checkpoint_manager
from penstock.engine.checkpoint.folders import complete_checkpoints
from penstock.train.eval.evaluator import Evaluator
from penstock.train.launch.stop_request import StopRequest
from penstock.train.metrics import recorder
from penstock.train.metrics.jsonl import read_metrics
from penstock.train.metrics.recorder import MetricsRecorder
from penstock.train.trackers import supervisor
from tests.engine import runs
from tests.ranks import RankError, on_ranks
from tests.turns import one_day_in

pytestmark = [pytest.mark.dist, pytest.mark.slow]

STEPS = 20
"""More than pass before a save behind training is killed, four times, also on a busy machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interrupted")
    runs.write_rows(folder / "packed", 10)
    runs.write_rows(folder / "packed", 3, seed=1, split="validation")
    runs.write_config(folder / "model")
    return folder


def job(folder, out, **train):
    often = {"save_steps": 2, "eval_steps": 2, "eval_micro_batch_size": 1}
    settings = {"max_steps": STEPS, **often, **train}
    data = {"val_set_size": 3}
    run = runs.run_config(
        folder / out, folder / "model", data=data, data_parallel_mode="none", **settings
    )
    return runs.job_of(run, folder / "packed")


def send(signum):
    os.kill(os.getpid(), signum)


def while_evaluating(signum):
    """Between two batches of the first evaluation."""
    evaluate = Evaluator.evaluate

    def interrupted(self, is_asked_to_stop, *, max_rows=None):
        asked = []

        def ask():
            asked.append(1)
            if max_rows is None and len(asked) == 2:
                send(signum)
            return is_asked_to_stop()

        return evaluate(self, ask, max_rows=max_rows)

    Evaluator.evaluate = interrupted


def while_saving(signum):
    """With the files of the first checkpoint written, and nothing that says so."""
    write = checkpoint_manager.write_boxes

    def interrupted(*given):
        written = write(*given)
        send(signum)
        return written

    checkpoint_manager.write_boxes = interrupted


def while_publishing(signum):
    """With the first checkpoint whole, and not yet where it belongs."""
    rename = pathlib.Path.rename

    def interrupted(self, target):
        if self.parent.name == "checkpoints":
            send(signum)
        return rename(self, target)

    pathlib.Path.rename = interrupted


def while_logging(signum):
    """With half a record written."""
    write = os.pwrite

    def interrupted(file, data, at):
        if b'"loss"' in data:
            write(file, data[: len(data) // 2], at)
            send(signum)
        return write(file, data, at)

    os.pwrite = interrupted


MOMENTS = (while_evaluating, while_saving, while_publishing, while_logging)

GONE = ["timeit", "-n", "1", "-r", "1", "raise OSError('no route to host')"]
HUNG = ["timeit", "-n", "1", "-r", "1", "import sys, time; sys.stdin.read(); time.sleep(5)"]


def followed_in_vain():
    """Two trackers for every run: one is never reached, the other never answers."""
    recorder.select_trackers = lambda _: (["mlflow", "trackio"], [])
    recorder.POLL_SECONDS, supervisor.SHUTDOWN_SECONDS = 0, 0.2

    def start(self, title, module, argument):
        module = GONE if argument == "mlflow" else HUNG
        self._trackers.start(title, module, self._job.output_dir / "logs" / f"{argument}.log")

    MetricsRecorder._start_process = start


def start(job, moment=None, signum=None):
    """One start of the run, interrupted then; its facts and which checkpoints there are."""
    followed_in_vain()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # The tests may run under nohup.
    if moment:
        moment(signum)
    facts = runs.train_here(job, StopRequest().install_handlers())
    return facts, saved(job)


def saved(job):
    """The bytes of every checkpoint."""
    return {
        (folder.name, file.name): file.read_bytes()
        for folder in complete_checkpoints(job.output_dir / "checkpoints")
        for file in folder.iterdir()
    }


def told(job):
    """What was told of steps and of evaluations; and warnings, which are of one start."""
    records = list(read_metrics(job.output_dir / "metrics.jsonl"))
    return [
        {name: record[name] for name in ("step", "loss", "eval_loss") if name in record}
        for record in records
        if "warning" not in record
    ]


@one_day_in(3, of=1)
@pytest.mark.parametrize("way", ["behind", pytest.param("at once", marks=pytest.mark.exhaustive)])
def test_a_run_that_is_interrupted_everywhere_ends_as_one_that_is_not(way, folder):
    whole = job(folder, f"whole {way}")
    its = job(folder, f"interrupted {way}", save_async=way == "behind")
    [(facts, final)] = on_ranks(1, start, whole)
    assert facts["steps"] == STEPS
    before = {}
    requests = cycle((signal.SIGTERM, signal.SIGHUP))
    for moment in MOMENTS:
        with pytest.raises(RankError, match="died without a word"):
            on_ranks(1, start, its, moment, signal.SIGKILL)
        now = saved(its)
        assert now.items() >= before.items(), moment
        # Asked to stop in the same place, it saves what it has done.
        [(stopped, now)] = on_ranks(1, start, its, moment, next(requests))
        assert stopped is None
        assert now.items() > before.items(), moment
        before = now
    [(ended, now)] = on_ranks(1, start, its)
    assert ended == facts
    assert told(its) == told(whole)
    assert [one["step"] for one in told(its) if "loss" in one] == list(range(1, STEPS + 1))
    # A checkpoint says what was owed when it was written, which is of the interruption.
    tensors = {name for name in final if not name[1].endswith(".json")}
    assert {folder for folder, _ in tensors} == {
        f"global_step_{step}" for step in range(2, STEPS + 1, 2)
    }
    assert {name: now[name] for name in tensors} == {name: final[name] for name in tensors}
    assert "no route to host" in (its.output_dir / "logs" / "mlflow.log").read_text()
