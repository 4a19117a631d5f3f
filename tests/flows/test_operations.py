"""Runs that are cancelled, killed, left by their worker or their server; and what they are told in
confidence. With a real server and real workers."""

import json
import os
import re
import secrets
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from penstock.core.stage import ATTEMPT, MANIFEST
from tests.conftest import ROOT
from tests.flows.server import FLOW, PREFECT, Prefect, soon
from tests.pipeline.runs import penstock, sealed, statuses, write_chats, write_run

GONE_SECONDS = 40
"""How long processes may stay after a run is cancelled."""

PLACES = {
    "prepare": "prepared/prepare/*",
    "pack": "prepared/pack/*",
    "train": "out",
    "export": "artifacts/export/*",
}


def processes_of(run: str) -> list[int]:
    """Every process that belongs to a flow run: its own, torchrun's, and those of ranks."""
    found: list[int] = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"PREFECT__FLOW_RUN_ID={run}".encode() in environment.read_bytes():
                found.append(int(environment.parent.name))
    return found


def leader_of(run: str) -> int:
    """The process of a flow run that all others of it come from."""
    mine = processes_of(run)
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().split()[3]) for pid in mine}
    [leader] = [pid for pid, parent in parents.items() if parent not in mine]
    return leader


def rank_of(run: str) -> int:
    """The process of a flow run that trains."""
    words = {
        pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in processes_of(run)
    }
    [rank] = [
        pid
        for pid, its in words.items()
        if its[-2:-1] and its[-2].endswith(b"job.json") and b"penstock.engine.agent" not in its
    ]
    return rank


def cancel(prefect: Prefect, run: str) -> None:
    """As the button in the browser does."""
    state = {"type": "CANCELLING", "name": "Cancelling"}
    answer = prefect.post(f"/flow_runs/{run}/set_state", {"state": state})
    assert answer.json()["status"] == "ACCEPT", answer.text


def steps_in(folder: Path) -> list[int]:
    file = folder / "out" / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["step"] for line in lines]


def is_saved(folder: Path) -> bool:
    """Whether the last step that was told is in a checkpoint."""
    last = steps_in(folder)[-1]
    return (folder / "out" / "checkpoints" / f"global_step_{last}" / "COMPLETE").is_file()


def keep_secret(prefect: Prefect, name: str, value: str) -> str:
    """A Secret block, and how the variables of a job refer to it."""
    kind = prefect.api.get("/block_types/slug/secret").json()["id"]
    wanted = {"block_schemas": {"block_type_id": {"any_": [kind]}}}
    schema = prefect.ask("block_schemas", **wanted)[0]["id"]
    block = {"name": name, "block_type_id": kind, "block_schema_id": schema}
    made = prefect.post("/block_documents/", {**block, "data": {"value": value}})
    assert made.status_code == 201, made.text
    return f"{{{{ prefect.blocks.secret.{name} }}}}"


@pytest.mark.slow
def test_a_cancelled_run_leaves_a_checkpoint_no_process_and_nothing_of_its_secrets(
    deployed, tmp_path
):
    write_chats(tmp_path / "chats.jsonl", 400)
    config = write_run(
        tmp_path, train={"num_train_epochs": 400, "save_steps": 0, "use_wandb": False}
    )
    planted = {
        name: secrets.token_hex(16)
        for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY")
    }
    refused = f"s3://key:{secrets.token_hex(16)}@bucket/rows.jsonl"
    there = deployed.api.get("/deployments/name/finetune/finetune").json()
    for wrong in (
        {"data.datasets": [{"path": refused}]},
        {"data.datasets.0.path": f"https://host/rows.jsonl?X-Amz-Signature={refused[9:20]}"},
        {"launch.env": {"HF_TOKEN": planted["HF_TOKEN"]}},
        {"launch.env.HF_TOKEN": planted["HF_TOKEN"]},
    ):
        values = {"parameters": {"config": str(config), "overrides": wrong}}
        answer = deployed.post(f"/deployments/{there['id']}/create_flow_run", values)
        assert answer.status_code == 409, wrong

    env = {
        name: keep_secret(deployed, name.lower().replace("_", "-"), value)
        for name, value in planted.items()
    }
    asked = {"parameters": {"config": str(config)}, "job_variables": {"env": env}}
    run = deployed.post(f"/deployments/{there['id']}/create_flow_run", asked).json()["id"]
    soon(lambda: steps_in(tmp_path), 200)
    for pid in processes_of(run):
        given = Path(f"/proc/{pid}/environ").read_bytes()
        assert f"HF_TOKEN={planted['HF_TOKEN']}".encode() in given
    cancel(deployed, run)
    soon(lambda: not processes_of(run), GONE_SECONDS)
    assert is_saved(tmp_path)
    soon(lambda: deployed.api.get(f"/flow_runs/{run}").json()["state_type"] == "CANCELLED", 20)

    told = penstock("run", config, "--data.datasets.0.path", refused, check=None)
    named = penstock("run", config, f"--launch.env.HF_TOKEN={planted['HF_TOKEN']}", check=2)
    said = told.stdout + told.stderr + named.stdout + named.stderr

    def holding(value: str) -> list[Path]:
        written = (path for folder in (tmp_path, deployed.home) for path in folder.rglob("*"))
        return [path for path in written if path.is_file() and value.encode() in path.read_bytes()]

    assert any(path.name.startswith("prefect.db") for path in holding(str(config)))
    for value in (*planted.values(), refused[9:41]):
        assert value not in said
        assert holding(value) == []


@pytest.mark.slow
def test_a_credential_typed_behind_the_script_is_refused_before_prefect_knows_of_it(
    prefect, tmp_path
):
    value = secrets.token_hex(16)
    words = ["--data.datasets.0.path", f"s3://key:{value}@bucket/rows.jsonl"]
    process = prefect.spawn([*FLOW, str(write_run(tmp_path)), *words], "refused")
    assert process.wait(120) == 2
    said = (prefect.home / "refused.log").read_text()
    assert "--data.datasets.0.path holds a credential" in said
    assert value not in said


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


def is_begun(folder: Path, stage: str) -> bool:
    """Whether the stage is under way, or over."""
    at = PLACES[stage]
    return any(path for name in (ATTEMPT, MANIFEST) for path in folder.glob(f"{at}/{name}"))


def manifests_in(folder: Path) -> dict[Path, bytes]:
    """Every seal there is, with the time it was made."""
    return {
        path: path.read_bytes()
        for at in PLACES.values()
        for path in folder.glob(f"{at}/{MANIFEST}")
    }


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
