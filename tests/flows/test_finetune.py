"""The chain as a Prefect flow, on Prefect's embedded server, without any network."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.pipeline.runs import write_chats, write_run

pytestmark = pytest.mark.slow

FLOW = [sys.executable, str(ROOT / "flows" / "finetune.py")]


def environment(home: Path) -> dict[str, str]:
    """A Prefect of its own, so that a test leaves nothing in the user's."""
    return {**os.environ, "PREFECT_HOME": str(home), "PYTHONPATH": ""}


def run_flow(config: Path, home: Path) -> str:
    done = subprocess.run(
        [*FLOW, str(config), "--train.lr=0.02"],
        capture_output=True,
        text=True,
        check=False,
        env=environment(home),
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def recorded(home: Path) -> tuple[set[tuple[str, str]], set[str]]:
    """What Prefect wrote down: (task run, state) pairs, and the keys of artifacts."""
    code = (
        "import asyncio, json\n"
        "from prefect.client.orchestration import get_client\n"
        "from prefect.client.schemas.filters import *\n"
        "async def look():\n"
        "    async with get_client() as client:\n"
        "        runs = await client.read_task_runs()\n"
        "        artifacts = await client.read_artifacts(\n"
        "            artifact_filter=None, flow_run_filter=None, task_run_filter=None)\n"
        "    print(json.dumps([[(r.name, r.state_name) for r in runs],\n"
        "                      [a.key for a in artifacts]]))\n"
        "asyncio.run(look())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**environment(home), "DO_NOT_TRACK": "1"},
    )
    runs, keys = json.loads(done.stdout.splitlines()[-1])
    return {(name, state) for name, state in runs}, set(keys)


def test_stages_run_as_tasks_and_are_shown_as_cached_the_second_time(tmp_path):
    config = write_run(tmp_path, pipeline={"name": "nightly run"})
    home = tmp_path / "prefect"
    first = run_flow(config, home)
    assert "Flow run 'nightly run'" in first
    assert first.count("Completed(") >= 4
    again = run_flow(config, home)
    assert again.count("Finished in state Cached('reused") == 4
    runs, keys = recorded(home)
    stages = ("prepare", "pack", "train", "export")
    for name in stages:
        manifest = {
            "prepare": "prepared/prepare/*",
            "pack": "prepared/pack/*",
            "train": "out",
            "export": "artifacts/export/*",
        }[name]
        key = json.loads(next(tmp_path.glob(f"{manifest}/manifest.json")).read_text())["key"][:16]
        assert {(f"{name} {key}", "Completed"), (f"{name} {key}", "Cached")} <= runs
    assert {f"penstock-{name}" for name in stages} <= keys


def test_ctrl_c_ends_the_ranks_with_a_checkpoint_saved(tmp_path):
    write_chats(tmp_path / "chats.jsonl", 400)
    config = write_run(tmp_path, train={"num_train_epochs": 400, "save_steps": 0})
    process = subprocess.Popen(
        [*FLOW, str(config)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(tmp_path / "prefect"),
    )
    metrics = tmp_path / "out" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and (not metrics.exists() or not metrics.stat().st_size):
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=90)
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert (tmp_path / "out" / "checkpoints" / f"global_step_{steps[-1]}" / "COMPLETE").is_file()
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, check=False)
    assert left.stdout == b""
