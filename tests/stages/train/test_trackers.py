"""Records reach trackers once each, and no tracker can hold up or end a run."""

import json
import os
import re
import subprocess
import sys
import threading
import time

import pytest

from penstock.core.errors import CapabilityError, ConfigError
from penstock.train.launch.job import METRICS
from penstock.train.metrics.jsonl import MetricsLog, read_metrics
from penstock.train.metrics.recorder import MetricsRecorder
from penstock.train.trackers import registry, supervisor, uploader
from penstock.train.trackers.registry import TITLES, require_trackers, select_trackers
from penstock.train.trackers.run_info import RunInfo, resolve_mlflow_uri
from penstock.train.trackers.supervisor import TrackerSupervisor
from penstock.train.trackers.tracker import Ending
from penstock.train.trackers.uploader import RunEnd, record_values, upload_run
from tests.packages import installed, write_package
from tests.stages.train.told_runs import falling, job_in, record, tell

EVALUATION = {"step": 4, "eval_loss": 1.5, "eval_loss/a": 1.25, "time": 1_700_000_004.5}
HIDDEN = "hunter2"


class Notebook:
    """A tracker that writes down what it is told, after failing as often as it is to."""

    def __init__(self, fails: int = 0) -> None:
        self.told: list[tuple[int, dict[str, float], float]] = []
        self.ending = ""
        self.cards: list[RunInfo] = []
        self._fails = fails

    def begin(self, card, memory):
        self.cards.append(card)
        memory.setdefault("id", f"run {len(self.cards)}")
        self.id = memory["id"]
        return self

    def log(self, step, values, at):
        if self._fails:
            self._fails -= 1
            raise ConnectionError("nobody answers")
        self.told.append((step, dict(values), at))

    def close(self, ending):
        self.ending = ending

    @property
    def steps(self):
        return [step for step, values, _ in self.told if "train/loss" in values]


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch):
    monkeypatch.setattr(uploader, "RETRY_DELAYS", (0.0, 0.0))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nowhere")


def carried(folder, tracker, name="trackio", ending: Ending = "finished"):
    end = RunEnd()
    end.ending = ending
    end.event.set()
    (folder / "trackers").mkdir(exist_ok=True)
    upload_run(name, folder, tracker.begin, end)


LEFT_OUT = ("count", "mfu", "note", "rank")
"""Of records what is no quantity, or none of one thing."""


def test_a_tracker_is_told_every_number_of_every_record_with_its_time(tmp_path):
    job_in(tmp_path)
    more = {
        "phases": {"data": 0.5},
        "grad_norms": {"layers.0": 2.0},
        "mfu": None,
        "note": "x",
        "memory_rank": 3,
    }
    routers = {"layers": [1, 3], "entropy": [0.5, 0.75], "imbalance": [2, 1], "counts": [[1], [2]]}
    rest = record(6, 1.2, **more, routers=routers)
    tell(tmp_path, [*falling(5), EVALUATION, {"step": 5, "warning": "look"}, rest])
    notebook = Notebook()
    carried(tmp_path, notebook)
    assert notebook.steps == [1, 2, 3, 4, 5, 6]
    step, values, at = notebook.told[0]
    told = record(1, 5.0)
    assert at == told.pop("time")
    assert step == told.pop("step")
    assert values == {f"train/{name}": value for name, value in told.items()}
    assert (4, {"eval/loss": 1.5, "eval/loss/a": 1.25}, EVALUATION["time"]) in notebook.told
    last = notebook.told[-1][1]
    assert last["seconds/data"] == 0.5
    assert last["grad_norm/layers.0"] == 2.0
    assert last["router/entropy.3"] == 0.75
    assert not {name for name in last if any(x in name for x in LEFT_OUT)}
    assert notebook.ending == "finished"


def test_a_run_that_goes_on_is_the_same_one_there_and_nothing_is_told_twice(tmp_path):
    job_in(tmp_path)
    tell(tmp_path, [*falling(5), EVALUATION])
    first, second = Notebook(), Notebook()
    carried(tmp_path, first, ending="stopped")
    assert first.ending == "stopped"
    # It goes on from a checkpoint before the last steps that were told.
    tell(tmp_path, [*falling(8)[3:], {**EVALUATION, "step": 8}], resumed_step=3)
    carried(tmp_path, second)
    assert first.steps + second.steps == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [s for s, values, _ in second.told if "eval/loss" in values] == [8]
    assert first.id == second.id


def test_steps_between_are_left_out_and_the_last_is_told(tmp_path):
    job_in(tmp_path, train={"log_interval": 4, "wandb_log_interval": 3})
    tell(tmp_path, [*falling(11), EVALUATION])
    for name, steps in (("trackio", [4, 8, 11]), ("wandb", [3, 6, 9, 11])):
        notebook = Notebook()
        carried(tmp_path, notebook, name)
        assert notebook.steps == steps
        assert 4 in [step for step, values, _ in notebook.told if "eval/loss" in values]


def test_what_fails_is_tried_again_and_given_up_with_what_was_told_kept(tmp_path):
    job_in(tmp_path)
    tell(tmp_path, falling(3))
    notebook = Notebook(fails=2)
    carried(tmp_path, notebook)
    assert notebook.steps == [1, 2, 3]
    tell(tmp_path, falling(5)[3:], resumed_step=3)
    with pytest.raises(ConnectionError):
        carried(tmp_path, Notebook(fails=3))
    later = Notebook()
    carried(tmp_path, later)
    assert later.steps == [4, 5]


def test_records_are_carried_as_they_come(tmp_path):
    job_in(tmp_path)
    (tmp_path / "trackers").mkdir()
    notebook, end = Notebook(), RunEnd()
    carrier = threading.Thread(target=upload_run, args=("trackio", tmp_path, notebook.begin, end))
    carrier.start()
    log = MetricsLog(tmp_path / METRICS, 0)
    for each in falling(3):
        log.append(each)
    deadline = time.monotonic() + 20
    while notebook.steps != [1, 2, 3]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    log.append(record(4, 1.0))
    log.close()
    end.event.set()
    carrier.join(20)
    assert notebook.steps == [1, 2, 3, 4]


def test_a_run_has_its_name_project_and_tags_there_and_no_secret(tmp_path):
    train = {"wandb_project": "ours", "wandb_tags": ["a", "b"]}
    data = {
        "datasets": [{"path": f"https://me:{HIDDEN}@host/r.jsonl?sig={HIDDEN}", "type": "text"}]
    }
    job = job_in(
        tmp_path,
        pipeline={"name": "mine"},
        train=train,
        data=data,
        launch={"env": {"NCCL_DEBUG": HIDDEN}},
    )
    card = RunInfo.from_job(job)
    assert (card.project, card.name, card.tags) == ("ours", "mine", ("a", "b"))
    assert card.settings["train.wandb_project"] == "ours"
    assert card.settings["data.datasets[0].path"] == "https://host/r.jsonl"
    assert HIDDEN not in json.dumps(dict(card.settings))
    named = job_in(tmp_path / "other", train={"wandb_name": "another"})
    assert RunInfo.from_job(named).name == "another"


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(registry, "find_spec", lambda _: None)


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("name", TITLES)
def test_a_tracker_whose_package_is_missing_is_refused_before_any_work(tmp_path, name):
    with pytest.raises(CapabilityError, match=re.escape(f"pip install 'penstock[{name}]'")):
        require_trackers(job_in(tmp_path, train={f"use_{name}": True}).config.train)
    require_trackers(job_in(tmp_path).config.train)


def test_weights_and_biases_is_used_where_there_is_a_login_unless_written(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "find_spec", lambda module: module)

    def found(**train):
        return select_trackers(job_in(tmp_path, train=train).config.train)

    assert found() == ([], [])
    offline, [note] = found(use_wandb=True)
    assert offline == ["wandb"]
    assert "wandb sync" in note
    monkeypatch.setenv("WANDB_API_KEY", "planted")
    assert found() == (["wandb"], [])
    assert found(use_wandb=False) == ([], [])
    assert found(use_wandb=True, use_mlflow=True) == (["wandb", "mlflow"], [])
    monkeypatch.setattr(registry, "find_spec", lambda _: None)
    none, [note] = found()
    assert none == []
    assert "penstock[wandb]" in note


def test_a_password_in_the_address_of_a_server_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as refused:
        job_in(tmp_path, train={"mlflow_tracking_uri": f"http://me:{HIDDEN}@host"})
    assert HIDDEN not in str(refused.value)


TIMEIT = ("timeit", "-n", "1", "-r", "1")


def test_processes_that_fail_or_hang_are_told_once_and_let_go(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "SHUTDOWN_SECONDS", 0.5)
    said: list[str] = []
    all_of_them = TrackerSupervisor(said.append)
    all_of_them.start("one", [*TIMEIT, "raise OSError('no route to host')"], tmp_path / "1.log")
    all_of_them.start("two", [*TIMEIT, "import time; time.sleep(600)"], tmp_path / "2.log")
    all_of_them.start("three", [*TIMEIT, "import sys; sys.stdin.read()"], tmp_path / "3.log")
    deadline = time.monotonic() + 30
    while not said:
        assert time.monotonic() < deadline
        all_of_them.poll()
        time.sleep(0.05)
    all_of_them.poll()
    assert len(said) == 1
    assert said[0].startswith("one stopped: OSError: no route to host")
    assert str(tmp_path / "1.log") in said[0]
    began = time.monotonic()
    all_of_them.close("finished")
    assert time.monotonic() - began < 5
    assert [line.split(" stopped")[0] for line in said] == ["one", "two"]
    assert "in time" in said[1]


def test_a_tracker_that_is_killed_before_it_says_a_word_is_told_by_its_status(tmp_path):
    said: list[str] = []
    alone = TrackerSupervisor(said.append)
    kill = "import os; os.kill(os.getpid(), 9)"
    alone.start("it", [*TIMEIT, kill], tmp_path / "log")
    deadline = time.monotonic() + 30
    while not said:
        assert time.monotonic() < deadline
        alone.poll()
        time.sleep(0.05)
    assert said[0].startswith("it stopped: its process ended with status -9")
    alone.close("stopped")
    assert len(said) == 1


def test_a_tracker_that_hangs_ends_its_process_and_says_so(tmp_path):
    said: list[str] = []
    hung = (
        "from penstock.train.trackers import uploader;uploader.CALL_TIMEOUT_SECONDS = 0.2;"
        "import time;uploader._with_retries(lambda: time.sleep(600))"
    )
    alone = TrackerSupervisor(said.append)
    alone.start("it", [*TIMEIT, hung], tmp_path / "log")
    deadline = time.monotonic() + 30
    while not said:
        assert time.monotonic() < deadline
        alone.poll()
        time.sleep(0.05)
    assert "a call to it timed out" in said[0]
    alone.close("stopped")
    assert len(said) == 1


def test_a_disk_that_is_full_loses_no_record_and_stops_nobody(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    def written():
        return [each["step"] for each in read_metrics(tmp_path / METRICS)]

    recorder = MetricsRecorder(
        job_in(tmp_path, train={"log_format": "structured"}), done=0, total=9
    )
    recorder.log(record(1, 3.0))
    for step in (2, 3):
        with monkeypatch.context() as context:
            context.setattr(os, "pwrite", full)
            recorder.log(record(step, 2.0))
        assert written() == [1]
    recorder.log(record(4, 1.5))
    assert written() == [1, 2, 3, 4]
    recorder.close()
    said = capsys.readouterr().err
    assert said.count("the disk is full") == 1
    assert "step=3 " in said


def test_a_line_that_was_cut_short_by_a_full_disk_is_written_again_whole(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path / METRICS, 0)
    log.append({"step": 1})
    write, sizes = os.pwrite, iter([5, None])

    def pwrite(file, data, at):
        size = next(sizes)
        if size is None:
            raise OSError(28, "No space left on device")
        return write(file, data[:size], at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    log.append({"step": 2})
    assert log.fault
    assert (tmp_path / METRICS).read_text() == '{"step": 1}\n'
    monkeypatch.setattr(os, "pwrite", write)
    log.append({"step": 3})
    log.close()
    assert [each["step"] for each in read_metrics(tmp_path / METRICS)] == [1, 2, 3]


def test_names_of_values_are_flat():
    assert record_values({"step": 3, "time": 1.0, "loss": 2, "skipped": True}) == {
        "train/loss": 2.0
    }


def test_mlflow_goes_where_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://theirs")
    told = {"use_mlflow": True, "mlflow_tracking_uri": "http://ours"}
    written = RunInfo.from_job(job_in(tmp_path, train=told))
    unwritten = RunInfo.from_job(job_in(tmp_path))
    assert [resolve_mlflow_uri(written), resolve_mlflow_uri(unwritten)] == [
        "http://ours",
        "http://theirs",
    ]
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert resolve_mlflow_uri(unwritten) == f"sqlite:///{tmp_path}/mlflow.db"


def test_events_of_tensorboard_go_where_it_is_written(tmp_path):
    told = {"use_tensorboard": True, "log_dir": str(tmp_path / "events")}
    assert (
        RunInfo.from_job(job_in(tmp_path / "a", train=told)).tensorboard_dir == tmp_path / "events"
    )
    assert (
        RunInfo.from_job(job_in(tmp_path / "a")).tensorboard_dir == tmp_path / "a" / "tensorboard"
    )


NOTES = """
import json
from pathlib import Path
from penstock.train.trackers.tracker import PackageTracker

class Notes(PackageTracker):
    file: str

    def start_run(self, run_info, state):
        return Run(run_info.folder / self.file)

class Run:
    def __init__(self, file):
        self.file = file

    def log(self, step, values, timestamp):
        with self.file.open("a") as stream:
            stream.write(json.dumps([step, values["train/loss"]]) + "\\n")

    def close(self, ending):
        with self.file.open("a") as stream:
            stream.write(json.dumps(ending) + "\\n")
"""


@pytest.mark.slow
def test_a_tracker_of_a_package_is_told_records_with_its_options(tmp_path):
    entry = {"penstock.trackers": {"notes": "notes_package:Notes"}}
    package = write_package(tmp_path / "package", "notes_package", "1.0", entry, NOTES)
    folder = tmp_path / "run"
    with installed(package):
        job = job_in(folder, train={"trackers": {"notes": {"file": "notes.jsonl"}}})
        assert "notes" in select_trackers(job.config.train)[0]
        with pytest.raises(ConfigError, match=r"train\.trackers\.notes\.file: field required"):
            job_in(tmp_path / "other", train={"trackers": {"notes": {}}})
        with pytest.raises(ConfigError, match=r"write train\.use_wandb: true"):
            job_in(tmp_path / "other", train={"trackers": {"wandb": {}}})
    tell(folder, falling(2))
    subprocess.run(
        [sys.executable, "-m", "penstock.train.trackers", "notes", str(folder)],
        env={**os.environ, "PYTHONPATH": str(package)},
        input=b"finished",
        check=True,
    )
    lines = [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]
    assert lines == [[1, 5.0], [2, 3.0], "finished"]
