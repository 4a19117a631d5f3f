"""Tracker packages themselves have what they were told, where they are installed."""

import json
import os
import struct
import subprocess
import sys

import pytest

from tests.stages.train.told_runs import falling, job_in, tell

pytestmark = pytest.mark.slow

HIDDEN = "hunter2"
EVALUATION = {"step": 4, "eval_loss": 1.5, "eval_loss/a": 1.25, "time": 1_700_000_004.5}


def run_tracker(name, folder):
    """As the leading rank starts it, with the run at its end."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "penstock.train.trackers", name, str(folder)],
        input=b"finished",
        capture_output=True,
        timeout=120,
        check=False,
        env={**os.environ, "HOME": str(folder), "TRACKIO_DIR": str(folder / "trackio")},
    )
    assert done.returncode == 0, done.stderr.decode()


def two_starts(name, folder, **train):
    """A run of 5 steps, of which the last two were told twice by a run that was killed."""
    hidden = {"env": {"NCCL_DEBUG": HIDDEN}}
    train = {f"use_{name}": True, **train}
    job_in(folder, pipeline={"name": "mine"}, train=train, launch=hidden)
    tell(folder, [*falling(4), EVALUATION])
    run_tracker(name, folder)
    tell(folder, falling(5)[3:], resumed_step=3)
    run_tracker(name, folder)


LOSSES = {step: pytest.approx(1 + 4 / step) for step in range(1, 6)}


@pytest.mark.parametrize("log_dir", [None, "else/where"])
def test_tensorboard_reads_what_it_was_told_where_it_was_told(log_dir, tmp_path):
    reader = "tensorboard.backend.event_processing.event_accumulator"
    accumulators = pytest.importorskip(reader)
    out = tmp_path / "out"
    out.mkdir()
    two_starts("tensorboard", out, **({"log_dir": str(tmp_path / log_dir)} if log_dir else {}))
    assert (out / "tensorboard").exists() == (log_dir is None)
    events = accumulators.EventAccumulator(str(tmp_path / (log_dir or "out/tensorboard")))
    events.Reload()
    assert {each.step: each.value for each in events.Scalars("train/loss")} == LOSSES
    assert len(events.Scalars("train/loss")) == 5
    [held] = events.Scalars("eval/loss")
    assert (held.step, held.value, held.wall_time) == (4, 1.5, EVALUATION["time"])


def test_mlflow_has_one_run_with_what_it_was_told(tmp_path):
    pytest.importorskip("mlflow")
    two_starts("mlflow", tmp_path, wandb_tags=["a"])
    ask = (
        "import json, sys; from mlflow.tracking import MlflowClient;"
        "c = MlflowClient('sqlite:///' + sys.argv[1]);"
        "[e] = [e for e in c.search_experiments() if e.name == 'penstock'];"
        "[r] = c.search_runs([e.experiment_id]);"
        "h = c.get_metric_history(r.info.run_id, 'train/loss');"
        "print(json.dumps([r.info.run_name, r.info.status, r.data.tags, r.data.params,"
        " [(m.step, m.value, m.timestamp) for m in h]]))"
    )
    command = [sys.executable, "-c", ask, str(tmp_path / "mlflow.db")]
    said = subprocess.run(command, capture_output=True, timeout=120, check=True).stdout
    name, status, tags, params, history = json.loads(said.splitlines()[-1])
    assert (name, status) == ("mine", "FINISHED")
    assert {step: value for step, value, _ in history} == LOSSES
    assert len(history) == 5
    assert history[0][2] == 1_700_000_001_000
    assert tags["a"] == "true"
    assert params["pipeline.name"] == "mine"


BROKEN_OFF = """
import json, sys
from pathlib import Path
from mlflow.tracking import MlflowClient
from penstock.train.launch.job import JOB, Job
from penstock.train.trackers.run_info import RunInfo, resolve_mlflow_uri
from penstock.train.trackers.mlflow import begin

def lost(*_, **__):
    raise ConnectionError

card, memory, whole = RunInfo.of(Job.read(Path(sys.argv[1]) / JOB)), {}, MlflowClient.log_batch
for client in (lost, whole):
    MlflowClient.log_batch = client
    try:
        begin(card, memory)
    except ConnectionError:
        pass
params = MlflowClient(resolve_mlflow_uri(card)).get_run(memory["id"]).data.params
print(json.dumps([len(params), len(card.settings), sorted(memory)]))
"""


def test_mlflow_has_the_settings_of_a_run_that_was_begun_at_the_second_attempt(tmp_path):
    pytest.importorskip("mlflow")
    job_in(tmp_path, train={"use_mlflow": True})
    command = [sys.executable, "-c", BROKEN_OFF, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, timeout=120, check=True).stdout
    there, wanted, memory = json.loads(said.splitlines()[-1])
    assert there == wanted > 100
    assert memory == ["id"]


def test_trackio_has_one_run_with_what_it_was_told(tmp_path):
    pytest.importorskip("trackio")
    two_starts("trackio", tmp_path)
    ask = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as s;"
        "[r] = s.get_runs('penstock'); print(json.dumps([r, s.get_logs('penstock', r)]))"
    )
    said = subprocess.run(
        [sys.executable, "-c", ask],
        capture_output=True,
        timeout=120,
        check=True,
        env={**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")},
    ).stdout
    name, logs = json.loads(said.splitlines()[-1])
    assert name == "mine-01234567"
    assert {each["step"]: each["train/loss"] for each in logs if "train/loss" in each} == LOSSES


def test_weights_and_biases_keeps_the_run_for_later_without_a_login(tmp_path):
    pytest.importorskip("wandb")
    two_starts("wandb", tmp_path)
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1
    assert json.loads((tmp_path / "trackers" / "wandb.json").read_text())["id"] in files[0].name
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    found = {}
    for file in files:
        assert HIDDEN.encode() not in file.read_bytes()
        for data in logged(file.read_bytes()):
            one = records.Record()
            one.ParseFromString(data)
            told = {
                ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in one.history.item
            }
            if "train/loss" in told:
                assert told["_step"] not in found
                found[told["_step"]] = told["train/loss"]
    assert found == LOSSES


def logged(data):
    """The records of a file in LevelDB's log format, behind a head of its own."""
    at, record = 7, b""
    while at < len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""
