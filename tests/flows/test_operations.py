"""Runs that are killed, stopped, left by their worker, their server or their machine."""

import os
import random
import re
import signal
import subprocess
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from penstock.core.files import remove
from tests.conftest import ROOT
from tests.flows.runs import (
    GONE_SECONDS,
    PLACES,
    cancel,
    is_begun,
    is_saved,
    leader_of,
    manifests_in,
    processes_of,
    rank_of,
    steps_in,
)
from tests.flows.server import FLOW, PREFECT, Prefect
from tests.pipeline.kills.killing import damage, descendants, is_alive, unfinished
from tests.pipeline.runs import penstock, sealed, statuses, write_chats, write_run
from tests.waiting import soon


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_every_way_to_stop_a_run_leaves_one_that_goes_on_to_the_bytes_of_one_that_was_not(
    deployed, tmp_path
):
    calm, wild = tmp_path / "calm", tmp_path / "wild"
    write_chats(tmp_path / "chats.jsonl", 400)
    sections = {
        "data": {"datasets": [{"path": str(tmp_path / "chats.jsonl"), "type": "chat"}]},
        "train": {"num_train_epochs": 25, "save_steps": 0},
        "pipeline": {"retry_delay": 0.5},
        "export": {"model_card": False},  # it tells of the commit that trained
    }
    config = write_run(wild, **sections)
    penstock("run", write_run(calm, **sections))
    serving = deployed.spawn(
        [PREFECT, "flow", "serve", "flows/finetune.py:finetune", "--name", "served"], "serve"
    )
    soon(lambda: deployed.api.get("/deployments/name/finetune/served").status_code == 200)

    def goes_on() -> None:
        before = steps_in(wild)
        soon(lambda: len(steps_in(wild)) > len(before), 200)

    for name in ("finetune", "served"):
        run = deployed.submit(f"finetune/{name}", config=str(config))
        goes_on()
        os.kill(rank_of(run), signal.SIGKILL)
        goes_on()
        soon(lambda run=run: "Retry" in deployed.logs(run), 30)
        cancel(deployed, run)
        soon(lambda run=run: not processes_of(run), GONE_SECONDS)
        assert is_saved(wild)
    by_hand = deployed.spawn([*FLOW, str(config)], "by-hand-stopped")
    goes_on()
    (wild / "out" / "STOP").touch()
    assert by_hand.wait(GONE_SECONDS) == 128 + signal.SIGTERM
    assert is_saved(wild)
    [stopped] = deployed.ask(
        "flow_runs", flow_runs={"state": {"name": {"any_": ["Stopped"]}}}, limit=5
    )
    assert stopped["state_type"] == "CANCELLED"
    by_hand = deployed.spawn([*FLOW, str(config)], "by-hand-interrupted")
    goes_on()
    by_hand.send_signal(signal.SIGINT)
    by_hand.wait(GONE_SECONDS)
    assert is_saved(wild)
    done = deployed.ended(deployed.submit("finetune/finetune", config=str(config)), 400)
    assert done["state_type"] == "COMPLETED", deployed.told
    assert sealed(wild) == sealed(calm)
    serving.terminate()
    serving.wait(120)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_flow_worker_and_server_are_killed_in_every_stage_and_nothing_is_lost_or_done_twice(
    tmp_path,
):
    write_chats(tmp_path / "chats.jsonl", 400)
    sections = {
        "data": {"datasets": [{"path": str(tmp_path / "chats.jsonl"), "type": "chat"}]},
        "train": {"num_train_epochs": 5},
    }
    config = {name: write_run(tmp_path / name, **sections) for name in ("flow", "worker", "server")}
    here = Prefect(tmp_path / "prefect")
    try:
        here.start()
        worker = here.work()
        here.run(PREFECT, "--no-prompt", "deploy", "--name", "finetune")
        for stage in PLACES:
            before = manifests_in(tmp_path / "flow")
            run = here.submit("finetune/finetune", config=str(config["flow"]))
            soon(lambda stage=stage: is_begun(tmp_path / "flow", stage), 200, every=0.005)
            os.kill(leader_of(run), signal.SIGKILL)
            assert here.ended(run)["state_type"] == "CRASHED"
            soon(lambda run=run: not processes_of(run), GONE_SECONDS)
            after = manifests_in(tmp_path / "flow")
            assert {path: after[path] for path in before} == before
        for stage in PLACES:
            run = here.submit("finetune/finetune", config=str(config["worker"]))
            soon(lambda stage=stage: is_begun(tmp_path / "worker", stage), 200, every=0.005)
            worker.kill()
            worker.wait()
            # It ends when it next has something to say.
            soon(lambda run=run: not processes_of(run), 200)
            assert here.ended(run)["state_type"] in ("CRASHED", "COMPLETED")
            worker = here.work()
        run = here.submit("finetune/finetune", config=str(config["server"]))
        for stage in PLACES:
            soon(lambda stage=stage: is_begun(tmp_path / "server", stage), 200, every=0.005)
            here.kill()
            here.start()
        assert here.ended(run, 400)["state_type"] == "COMPLETED", here.told
        results = []
        for name, file in config.items():
            before = manifests_in(tmp_path / name)
            run = here.submit("finetune/finetune", config=str(file))
            assert here.ended(run)["state_type"] == "COMPLETED", here.told
            after = manifests_in(tmp_path / name)
            assert {path: after[path] for path in before} == before
            assert len(after) == len(PLACES)
            penstock("artifacts", "verify", "--root", tmp_path / name)
            assert set(statuses(penstock("run", file, "--json")).values()) == {"cached"}
            results.append(sealed(tmp_path / name))
        assert results[0] == results[1] == results[2]
    finally:
        here.stop()


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_a_flow_killed_at_random_and_its_damaged_files_leave_the_same_bytes(prefect, tmp_path):
    seed, kills = (
        int(os.environ.get(f"PENSTOCK_{name}", "10")) for name in ("KILLS_SEED", "KILLS")
    )
    write_chats(tmp_path / "chats.jsonl", 400)
    sections = {
        "data": {"datasets": [{"path": str(tmp_path / "chats.jsonl"), "type": "chat"}]},
        "export": {"model_card": False},  # it tells of the commit that trained
    }
    folder = tmp_path / "wild"
    config, rng, count = write_run(folder, **sections), random.Random(seed), Counter[str]()
    penstock("run", write_run(tmp_path / "calm", **sections))
    roots = [folder / name for name in ("prepared", "artifacts", "out")]
    while count["kills"] < kills:
        damaged: list[Path] = []
        for root in roots:
            remove(root)
        for _ in range(rng.randint(1, 3)):
            flow = prefect.spawn([*FLOW, str(config)], "killed")
            with suppress(subprocess.TimeoutExpired):
                flow.wait(rng.uniform(0, 25))
            if flow.poll() is not None:
                continue
            below = descendants(flow.pid)
            victim = rng.choice([flow.pid, *below])
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            count["kills"] += 1
            count["of the flow itself"] += victim == flow.pid
            flow.wait(200)
            soon(lambda below=below: not any(map(is_alive, below)), GONE_SECONDS)
            if rng.random() < 0.5 and (path := damage(rng, unfinished(*roots))):
                damaged.append(path)
        again = prefect.spawn([*FLOW, str(config)], "again")
        if again.wait(300) == 0:
            assert sealed(folder) == sealed(tmp_path / "calm"), damaged
            count["reruns to equal bytes"] += 1
        else:
            told = (prefect.home / "again.log").read_text()
            assert any(path.name in told for path in damaged), (damaged, told[-3000:])
            count["errors that name the damaged file"] += 1
        count["damages"] += len(damaged)
    print(f"flow: seed {seed}, {dict(count)}")


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_run_whose_machine_is_gone_is_told_as_crashed_and_the_next_one_goes_on(prefect, tmp_path):
    written = (ROOT / "deploy" / "automations" / "crashed.yaml").read_text()
    [automation] = yaml.safe_load(written)["automations"]
    automation["trigger"]["within"] = 60
    made = prefect.post("/automations/", automation)
    assert made.status_code == 201, made.text
    write_chats(tmp_path / "chats.jsonl", 400)
    config = write_run(tmp_path, train={"num_train_epochs": 10, "save_steps": 20})
    # Started by hand, there is no worker that sees it die.
    command = ["env", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY=30", *FLOW, str(config)]
    lost = prefect.spawn(command, "lost")
    soon(lambda: steps_in(tmp_path), 200)
    told = (prefect.home / "lost.log").read_text()
    [run] = set(re.findall(r"flow-run/([0-9a-f-]{36})", told))
    lost.kill()
    lost.wait()
    assert prefect.api.get(f"/flow_runs/{run}").json()["state_type"] == "RUNNING"
    assert prefect.ended(run, 300)["state_type"] == "CRASHED"
    again = prefect.spawn([*FLOW, str(config)], "found")
    assert again.wait(300) == 0
    assert f"resumed -> {tmp_path / 'out'}" in (prefect.home / "found.log").read_text()
    prefect.api.delete(f"/automations/{made.json()['id']}")
