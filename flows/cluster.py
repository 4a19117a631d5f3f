"""Tokenizes slices on the workers of a Dask or Ray cluster, with `pipeline.task_runner`.

Only tokenizing runs on the cluster. Sealing, packing and training run in the flow's own thread,
where they can be cancelled. Workers and flow share the files in `data.dataset_prepared_path`.
"""

import importlib
import os
import platform
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
from prefect import get_client, get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.task_runners import TaskRunner

from penstock.config.schema.run import RunConfig
from penstock.core import env
from penstock.core.cache.stage import Source
from penstock.core.cache.store import find_cached
from penstock.core.errors import CapabilityError
from penstock.pipeline.plan import Plan
from penstock.prepare.process_warnings import (
    ProcessWarnings,
    collect_warnings,
    log_process_warnings,
)
from penstock.prepare.stage import Prepare

# Workers cannot import a script that is loaded by its path, so it is pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@task(
    task_run_name="prepare share {number} of {count}", cache_policy=NO_CACHE, persist_result=False
)
def prepare_share(stage: Prepare, out: Path, number: int, count: int) -> dict[str, Any]:
    """Tokenize one share of the missing slices, on a worker of the cluster."""
    with collect_warnings() as warnings:
        done = stage.prepare_share(out, number - 1, count)
    return {
        "share": f"{number}/{count}",
        **asdict(done),
        "worker": f"{platform.node()}:{os.getpid()}",
        "warnings": warnings,
    }


def tokenize_on_cluster(planned: Plan, runner: TaskRunner[Any], count: int) -> None:
    """Tokenize the missing slices on the workers of a cluster, in `count` shares.

    The stage then finishes the data, with all slices cached.
    """
    step = planned.step("prepare")
    if not isinstance(step.stage, Prepare) or find_cached(step):
        return
    stage, out = with_absolute_paths(step.stage), step.path.absolute()
    # The address of an embedded server is in no setting; without it each worker would start a
    # server of its own.
    with (
        temporary_settings({PREFECT_API_URL: str(get_client(sync_client=True).api_url)}),
        runner as cluster,
    ):
        shares = [
            cluster.submit(
                prepare_share, {"stage": stage, "out": out, "number": number, "count": count}
            )
            for number in range(1, count + 1)
        ]
        rows = [share.result() for share in shares]
    log_process_warnings(ProcessWarnings(row["worker"], row.pop("warnings")) for row in rows)
    for row in rows:
        get_run_logger().info(
            "prepare: %(worker)s did %(done)s of the %(slices)s slices of share %(share)s", row
        )
    create_table_artifact(key="penstock-prepare-shares", table=rows)


def with_absolute_paths(stage: Prepare) -> Prepare:
    """The stage with absolute paths, for processes with another working directory.

    A worker may not start processes, so `num_proc` is 1.
    """

    def absolute(sources: tuple[Source, ...]) -> tuple[Source, ...]:
        return tuple(
            replace(source, paths=tuple(path.absolute() for path in source.paths))
            for source in sources
        )

    tokenizer = stage.tokenizer_path
    if stage.tokenizer.pin["kind"] == "files":
        tokenizer = str(Path(tokenizer).expanduser().absolute())
    return replace(
        stage,
        sources=absolute(stage.sources),
        test_sources=absolute(stage.test_sources),
        decontaminate_sources=absolute(stage.decontaminate_sources),
        tokenizer_path=tokenizer,
        num_proc=1,
    )


def build_task_runner(run: RunConfig) -> TaskRunner[Any] | None:
    """The task runner for slices, or None. Raises CapabilityError if it is not installed."""
    kind, address = run.pipeline.task_runner, run.pipeline.task_runner_address
    if kind is None:
        return None
    try:
        package = importlib.import_module(f"prefect_{kind}")
        if kind == "ray":
            _pickle_by_value_in_ray(importlib.import_module("ray.cloudpickle"))
    except ImportError as error:
        raise CapabilityError(
            f"pipeline.task_runner is {kind}, which needs a package that is not installed "
            f"({error.name}).\n  pip install 'penstock[{kind}]', or leave pipeline.task_runner out "
            "to use processes of this machine."
        ) from error
    if kind == "dask":
        local_cluster = {
            "n_workers": num_shares(run),
            "threads_per_worker": 1,
            "memory_limit": 0,  # else a worker gets this machine's memory divided by its CPUs
            "dashboard_address": "127.0.0.1:0",  # any free port
            # Its processes unpickle what they receive: TLS, with certificates made for this
            # cluster, so that other users of this machine cannot send anything.
            "security": True,
        }
        return package.DaskTaskRunner(
            address=address, cluster_kwargs=None if address else local_cluster
        )
    return package.RayTaskRunner(
        address=address,
        # Only with this address does Ray listen on loopback alone.
        init_kwargs=None
        if address
        else {"num_cpus": num_shares(run), "_node_ip_address": "127.0.0.1"},
    )


def _pickle_by_value_in_ray(pickler: ModuleType) -> None:
    # Ray pickles with its own copy of cloudpickle, whose registry of modules is empty.
    for name in cloudpickle.list_registry_pickle_by_value():
        pickler.register_pickle_by_value(sys.modules[name])


def num_shares(run: RunConfig) -> int:
    """The number of shares of the slices."""
    workers = run.pipeline.task_runner_workers
    return workers or run.data.dataset_num_proc or env.num_processors()
