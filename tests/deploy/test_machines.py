"""Workers of two machines, on one: a run that they share, and one that has to save and end."""

import json
import signal
import sys

import pytest

from tests.conftest import ROOT
from tests.flows.server import PREFECT, Prefect, free_port
from tests.waiting import soon

pytestmark = pytest.mark.exhaustive

LONG = {"train.max_steps": 100_000, "train.num_train_epochs": 1000, "train.save_steps": 100_000}


def asked(prefect: Prefect, deployment: str, overrides: dict) -> str:
    said = prefect.run(
        PREFECT,
        *("deployment", "run", f"finetune/{deployment}", "-p", "config=configs/quickstart.yaml"),
        *("-p", f"overrides={json.dumps(overrides)}"),
    )
    return said.split("UUID: ")[1].split()[0]


def test_two_machines_train_one_run_and_a_worker_saves_what_it_runs_before_it_ends(tmp_path):
    prefect = Prefect(tmp_path / "prefect")
    try:
        prefect.start()
        prefect.run(PREFECT, "work-pool", "create", "penstock", "--type", "process")
        workers = []
        for number in range(2):
            queue = ("--pool", "penstock", "--work-queue", f"machine-{number}")
            named = ("--name", f"machine-{number}")
            flow = "flows/finetune.py:finetune"
            prefect.run(PREFECT, "--no-prompt", "deploy", flow, *named, *queue)
            start = [sys.executable, str(ROOT / "deploy" / "worker.py"), PREFECT, "worker", "start"]
            workers.append(prefect.spawn([*start, *queue, "--limit", "1"], f"worker-{number}"))
        where = {
            "train.output_dir": str(tmp_path / "out"),
            "data.dataset_prepared_path": str(tmp_path / "data"),
            "pipeline.artifacts_path": str(tmp_path / "artifacts"),
        }
        together = {
            **where,
            "train.max_steps": 2,
            "train.data_parallel_mode": "ddp",
            "launch.nproc_per_node": 1,
            "launch.nnodes": 2,
            "launch.rdzv_endpoint": f"127.0.0.1:{free_port()}",
        }
        runs = [asked(prefect, f"machine-{n}", {**together, "launch.node_rank": n}) for n in (1, 0)]
        for run in runs:
            assert prefect.ended(run)["state_name"] == "Completed", prefect.told
        assert (tmp_path / "out" / "manifest.json").exists()

        alone = asked(
            prefect, "machine-0", {**where, **LONG, "train.output_dir": str(tmp_path / "long")}
        )
        soon(lambda: (tmp_path / "long" / "metrics.jsonl").exists())
        workers[0].send_signal(signal.SIGTERM)
        assert workers[0].wait(150) == 0
        assert prefect.ended(alone)["state_name"] == "Crashed"
        assert list((tmp_path / "long" / "checkpoints").iterdir())
    finally:
        prefect.stop()
