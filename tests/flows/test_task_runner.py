"""`pipeline.task_runner`: slices prepared by the workers of a cluster, sealed by the flow."""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from penstock.config.load import loads
from penstock.core.errors import CapabilityError
from tests.cli.command import penstock
from tests.conftest import ROOT
from tests.flows.server import FLOW
from tests.pipeline.runs import write_chats, write_run
from tests.stages.prepared import contents

FILES = 6


@pytest.fixture(scope="module")
def cluster():
    """flows/cluster.py as a module."""
    spec = importlib.util.spec_from_file_location("cluster", ROOT / "flows" / "cluster.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["cluster"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["cluster"]


def config(**pipeline):
    return loads(
        {
            "model": {"config_path": "builtin:tiny-qwen3"},
            "data": {
                "datasets": [{"path": "builtin:arithmetic", "type": "chat"}],
                "dataset_num_proc": 3,
            },
            "train": {"output_dir": "out"},
            "pipeline": pipeline,
        }
    )


def test_a_cluster_is_that_of_the_address_or_one_of_as_many_workers_as_written(
    cluster, monkeypatch
):
    asked, sent = [], set()
    runners, pickler = types.ModuleType("prefect_ray"), types.ModuleType("ray.cloudpickle")
    vars(runners)["RayTaskRunner"] = lambda **given: asked.append(given)
    vars(pickler)["register_pickle_by_value"] = sent.add
    monkeypatch.setitem(sys.modules, "prefect_ray", runners)
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.cloudpickle", pickler)
    cluster.task_runner(config(task_runner="ray"))
    cluster.task_runner(config(task_runner="ray", task_runner_workers=5))
    cluster.task_runner(config(task_runner="ray", task_runner_address="ray://there:10001"))
    assert asked == [
        {"address": None, "init_kwargs": {"num_cpus": 3}},
        {"address": None, "init_kwargs": {"num_cpus": 5}},
        {"address": "ray://there:10001", "init_kwargs": None},
    ]
    assert cluster in sent
    there = cluster.task_runner(config(task_runner="dask", task_runner_address="tcp://there:8786"))
    assert (there.address, there.cluster_kwargs) == ("tcp://there:8786", {})
    here = cluster.task_runner(config(task_runner="dask", task_runner_workers=5))
    assert (here.address, here.cluster_kwargs["n_workers"]) == (None, 5)
    assert cluster.task_runner(config()) is None


def test_a_package_that_is_not_installed_is_named_before_any_work(cluster, monkeypatch):
    for kind in ("dask", "ray"):
        monkeypatch.setitem(sys.modules, f"prefect_{kind}", None)
        with pytest.raises(CapabilityError, match=rf"pip install 'penstock\[{kind}\]'"):
            cluster.task_runner(config(task_runner=kind))


def several_files(folder: Path, **pipeline) -> Path:
    """A run that only prepares, from files named relative to `folder`."""
    folder.mkdir()
    names = [f"chats-{number}.jsonl" for number in range(FILES)]
    for name in names:
        write_chats(folder / name, 20, salt=f" ({name})")
    return write_run(
        folder,
        data={
            "datasets": [{"path": name, "type": "chat"} for name in names],
            "dataset_prepared_path": "prepared",
        },
        pipeline={"stages": ["prepare"], **pipeline},
    )


def sealed(folder: Path) -> dict[str, bytes]:
    """All files of the one prepared artifact but its manifest, which tells when and where."""
    [manifest] = folder.glob("prepared/prepare/*/manifest.json")
    found = contents(manifest.parent)
    del found["manifest.json"]
    return {f"{manifest.parent.name}/{name}": content for name, content in found.items()}


def shares_told(text: str) -> list[tuple[str, int, int]]:
    """(worker, slices done, slices in the share) of every share that a flow told of."""
    lines = re.findall(r"prepare: (\S+) did (\d+) of the (\d+) slices of share", text)
    return [(worker, int(done), int(slices)) for worker, done, slices in lines]


@pytest.fixture
def dask_of_two_processes(prefect, tmp_path):
    """A scheduler and two workers, started elsewhere by hand; gives the scheduler's address."""
    pytest.importorskip("distributed")
    place = tmp_path / "elsewhere"
    place.mkdir()
    note = place / "scheduler.json"
    told = ["--scheduler-file", str(note), "--no-dashboard"]

    def start(*command: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", *command, *told],
            cwd=place,
            env=prefect.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    started = [start("distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0")]
    started += [
        start("distributed.cli.dask_worker", "--nworkers", "1", "--nthreads", "1", "--no-nanny")
        for _ in range(2)
    ]
    try:
        deadline = time.monotonic() + 60
        while not note.is_file() and time.monotonic() < deadline:
            time.sleep(0.1)
        yield json.loads(note.read_text())["address"]
    finally:
        for process in started:
            process.kill()  # asked to end, a worker waits long for the flow's server, which is gone
            process.wait()


@pytest.mark.slow
def test_two_dask_workers_prepare_every_slice_once_and_the_result_is_the_command_lines(
    dask_of_two_processes, prefect, tmp_path
):
    spread = several_files(
        tmp_path / "spread",
        task_runner="dask",
        task_runner_address=dask_of_two_processes,
        task_runner_workers=4,
    )
    shares = shares_told(prefect.run(*FLOW, "run.yaml", cwd=spread.parent))
    assert len({worker for worker, _, _ in shares}) == 2
    assert sum(slices for _, _, slices in shares) == FILES
    assert sum(done for _, done, _ in shares) == FILES
    assert len(list(tmp_path.glob("spread/prepared/slices/*.arrow"))) == FILES

    alone = several_files(tmp_path / "alone")
    ran = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "prepare", "run.yaml"],
        cwd=alone.parent,
        check=False,
    )
    assert ran.returncode == 0
    assert sealed(spread.parent) == sealed(alone.parent)


@pytest.mark.slow
def test_a_cluster_of_its_own_has_as_many_processes_as_written(cluster):
    pytest.importorskip("prefect_dask")
    with cluster.task_runner(config(task_runner="dask", task_runner_workers=2)) as runner:
        workers = runner.client.scheduler_info(n_workers=-1)["workers"]
        pids = runner.client.run(os.getpid)
    assert [worker["nthreads"] for worker in workers.values()] == [1, 1]
    assert len({os.getpid(), *pids.values()}) == 3


@pytest.mark.slow
def test_ray_prepares_every_slice_once(prefect, tmp_path):
    pytest.importorskip("prefect_ray")
    pytest.importorskip("ray")
    spread = several_files(tmp_path / "spread", task_runner="ray", task_runner_workers=2)
    shares = shares_told(prefect.run(*FLOW, "run.yaml", cwd=spread.parent))
    assert sum(done for _, done, _ in shares) == FILES


def test_the_command_line_says_that_it_uses_processes_of_this_machine(tmp_path, monkeypatch):
    run = several_files(tmp_path / "run", task_runner="dask")
    monkeypatch.chdir(run.parent)
    assert "pipeline.task_runner (dask) is for Prefect's flows" in penstock("prepare", run).err
    again = penstock("prepare", run, "--json")
    assert "task_runner" not in again.err
    assert again.last["stages"][0]["status"] == "cached"
