"""`pipeline.task_runner`: slices prepared by the workers of a cluster, sealed by the flow."""

import importlib
import os
import sys
import types
from pathlib import Path

import pytest

from penstock.config.loading.load import loads
from penstock.core.errors import CapabilityError
from tests.cli.command import penstock
from tests.pipeline.runs import write_chats, write_run

FILES = 6


@pytest.fixture
def cluster(scripts):
    """flows/cluster.py as a module."""
    del scripts
    return importlib.import_module("cluster")


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
    cluster.build_task_runner(config(task_runner="ray"))
    cluster.build_task_runner(config(task_runner="ray", task_runner_workers=5))
    cluster.build_task_runner(config(task_runner="ray", task_runner_address="ray://there:10001"))
    assert asked == [
        {"address": None, "init_kwargs": {"num_cpus": 3, "_node_ip_address": "127.0.0.1"}},
        {"address": None, "init_kwargs": {"num_cpus": 5, "_node_ip_address": "127.0.0.1"}},
        {"address": "ray://there:10001", "init_kwargs": None},
    ]
    assert cluster in sent
    there = cluster.build_task_runner(
        config(task_runner="dask", task_runner_address="tcp://there:8786")
    )
    assert (there.address, there.cluster_kwargs) == ("tcp://there:8786", {})
    here = cluster.build_task_runner(config(task_runner="dask", task_runner_workers=5))
    assert (here.address, here.cluster_kwargs["n_workers"]) == (None, 5)
    assert here.cluster_kwargs["security"] is True, "it unpickles what it is sent"
    assert cluster.build_task_runner(config()) is None


def test_a_package_that_is_not_installed_is_named_before_any_work(cluster, monkeypatch):
    for kind in ("dask", "ray"):
        monkeypatch.setitem(sys.modules, f"prefect_{kind}", None)
        with pytest.raises(CapabilityError, match=rf"pip install 'penstock\[{kind}\]'"):
            cluster.build_task_runner(config(task_runner=kind))


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


@pytest.mark.slow
def test_a_cluster_of_its_own_has_as_many_processes_as_written(cluster):
    pytest.importorskip("prefect_dask")
    with cluster.build_task_runner(config(task_runner="dask", task_runner_workers=2)) as runner:
        workers = runner.client.scheduler_info(n_workers=-1)["workers"]
        pids = runner.client.run(os.getpid)
    assert [worker["nthreads"] for worker in workers.values()] == [1, 1]
    assert len({os.getpid(), *pids.values()}) == 3


@pytest.mark.slow
def test_the_command_line_says_that_it_uses_processes_of_this_machine(tmp_path, monkeypatch):
    run = several_files(tmp_path / "run", task_runner="dask")
    monkeypatch.chdir(run.parent)
    assert "pipeline.task_runner (dask) is for Prefect's flows" in penstock("prepare", run).err
    again = penstock("prepare", run, "--json")
    assert "task_runner" not in again.err
    assert again.last["stages"][0]["status"] == "cached"
