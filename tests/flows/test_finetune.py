"""The chain as a Prefect flow: by hand, deployed, on a schedule, interrupted; no network."""

import json
import re
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.flows.server import FLOW, PREFECT, Prefect, soon
from tests.pipeline.runs import write_chats, write_run

STAGES = ("prepare", "pack", "train", "export")


def keys_of(folder: Path) -> dict[str, str]:
    """The first digits of every stage's key, from what lies on disk."""
    places = {
        "prepare": "prepared/prepare/*",
        "pack": "prepared/pack/*",
        "train": "out",
        "export": "artifacts/export/*",
    }
    manifests = {name: next(folder.glob(f"{at}/manifest.json")) for name, at in places.items()}
    return {name: json.loads(file.read_text())["key"][:16] for name, file in manifests.items()}


def tasks_of(prefect: Prefect, run: str) -> dict[str, str]:
    """The state of each task of a flow run, by the task's name."""
    wanted = {"id": {"any_": [run]}}
    return {t["name"]: t["state_name"] for t in prefect.ask("task_runs", flow_runs=wanted)}


def runs_of(prefect: Prefect, deployment: str) -> list[dict]:
    """All runs of a deployment, the oldest first."""
    wanted = {"name": {"any_": [deployment]}}
    return prefect.ask("flow_runs", deployments=wanted, sort="EXPECTED_START_TIME_ASC")


@pytest.fixture(scope="module")
def once(deployed, tmp_path_factory):
    """(folder, config, flow run) of a run that was asked for as the README does it."""
    folder = tmp_path_factory.mktemp("deployed")
    config = write_run(folder, pipeline={"name": "nightly run"})
    deployed.run(
        *(PREFECT, "deployment", "run", "finetune/finetune", "-p", f"config={config}"),
        *("-p", 'overrides={"train.lr": 2e-2}'),
    )
    [run] = runs_of(deployed, "finetune")
    run = deployed.ended(run["id"])
    assert run["state_type"] == "COMPLETED", deployed.told
    return folder, config, run


@pytest.mark.slow
def test_a_deployed_run_is_named_after_what_runs_and_its_stages_are_tasks_with_artifacts(
    deployed, once
):
    folder, _, run = once
    assert run["name"] == "nightly run: train.lr=0.02"
    written = json.loads((folder / "out" / "job.json").read_text())["config"]
    assert written["train"]["lr"] == 0.02
    expected = {f"{name} {key}": "Completed" for name, key in keys_of(folder).items()}
    assert soon(lambda: (found := tasks_of(deployed, run["id"])) == expected and found, 20)

    artifacts = deployed.ask("artifacts", flow_runs={"id": {"any_": [run["id"]]}})
    found = {artifact["key"]: artifact for artifact in artifacts}
    steps = json.loads((folder / "out" / "manifest.json").read_text())["facts"]["steps"]
    table = {row["fact"]: row["value"] for row in json.loads(found["penstock-train"]["data"])}
    assert (table["status"], table["steps"]) == ("ran", str(steps))
    assert {f"penstock-{name}" for name in STAGES} < set(found)
    assert float(found["penstock-progress"]["data"]) == 100
    assert f"| step | {steps} of {steps} (100.0%) |" in found["penstock-training"]["data"]
    assert (folder / "out" / "report.html").as_uri() in found["penstock-report"]["data"]


@pytest.mark.slow
def test_a_schedule_fires_and_what_is_there_is_shown_as_cached(deployed, once):
    folder, config, _ = once
    tracker = folder / "out" / "trackers" / "mlflow.json"
    tracker.parent.mkdir()
    tracker.write_text(json.dumps({"url": "https://mlflow.example/#/runs/1"}))
    deployed.run(
        *(PREFECT, "--no-prompt", "deploy", "flows/finetune.py:finetune", "--name", "often"),
        *("--pool", "penstock", "--param", f"config={config}"),
        *("--param", 'overrides={"train.lr": 0.02}', "--cron", "* * * * * */5"),
        *("--concurrency-limit", "1", "--collision-strategy", "CANCEL_NEW"),
    )
    begun = ("PENDING", "RUNNING", "COMPLETED")
    first = soon(lambda: [r for r in runs_of(deployed, "often") if r["state_type"] in begun])[0]
    there = deployed.api.get("/deployments/name/finetune/often").json()
    deployed.api.patch(f"/deployments/{there['id']}", json={"paused": True})
    run = deployed.ended(first["id"])
    assert (run["state_type"], run["auto_scheduled"]) == ("COMPLETED", True), deployed.told
    expected = {f"{name} {key}": "Cached" for name, key in keys_of(folder).items()}
    assert soon(lambda: (found := tasks_of(deployed, run["id"])) == expected and found, 20)
    artifacts = deployed.ask("artifacts", flow_runs={"id": {"any_": [run["id"]]}})
    found = {artifact["key"]: artifact["data"] for artifact in artifacts}
    assert {"penstock-report", *(f"penstock-{name}" for name in STAGES)} < set(found)
    assert "https://mlflow.example/#/runs/1" in found["penstock-mlflow"]
    assert "penstock-progress" not in found


@pytest.mark.slow
def test_parameters_that_are_none_are_refused_before_anything_is_scheduled(deployed):
    there = deployed.api.get("/deployments/name/pack/pack").json()

    def asked(**parameters: object) -> httpx.Response:
        values = {"config": "run.yaml", **parameters}
        at = f"/deployments/{there['id']}/create_flow_run"
        return deployed.post(at, {"parameters": values, "enforce_parameter_schema": True})

    properties = there["parameter_openapi_schema"]["properties"]
    assert all(properties[name]["description"] for name in ("config", "overrides", "force"))
    for wrong in (
        {"config": 1},
        {"overrides": {"lr": 1}},
        {"overrides": ["train.lr"]},
        {"force": ["trian"]},
    ):
        refused = asked(**wrong)
        assert refused.status_code == 409, wrong
        assert next(iter(wrong)) in refused.text
    fine = {"train.lr": 1e-4, "train.lr_warmup_steps": None, "data.datasets": [{"path": "x"}]}
    taken = asked(overrides={**fine, "data.skip_prepare_dataset": True}, force=["pack"])
    assert taken.status_code == 201, taken.text
    deployed.api.delete(f"/flow_runs/{taken.json()['id']}")


@pytest.mark.exhaustive
def test_ctrl_c_ends_the_ranks_with_a_checkpoint_saved(prefect, tmp_path):
    write_chats(tmp_path / "chats.jsonl", 400)
    config = write_run(tmp_path, train={"num_train_epochs": 400, "save_steps": 0})
    process = prefect.spawn([*FLOW, str(config)], "by-hand")
    metrics = tmp_path / "out" / "metrics.jsonl"
    soon(lambda: metrics.exists() and metrics.stat().st_size, 200)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=90)
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert (tmp_path / "out" / "checkpoints" / f"global_step_{steps[-1]}" / "COMPLETE").is_file()
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, check=False)
    assert left.stdout == b""


@pytest.mark.slow
def test_words_by_hand_that_no_flow_understands_are_refused(prefect, tmp_path):
    config = write_run(tmp_path)
    done = subprocess.run(
        [*FLOW, str(config), "--force", "prepare"],
        env=prefect.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--force prepare" in done.stderr
    assert not (tmp_path / "prepared").exists()


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_eight_runs_at_once_on_two_workers_prepare_and_pack_once(deployed, tmp_path):
    deployed.work("--limit", "4")
    write_run(tmp_path, pipeline={"name": "eight"})
    asked = [
        deployed.submit(
            "finetune/finetune",
            config=str(tmp_path / "run.yaml"),
            overrides={
                "train.lr": 10.0**-number,
                "train.output_dir": str(tmp_path / f"out-{number}"),
            },
        )
        for number in range(1, 9)
    ]
    for run in asked:
        assert deployed.ended(run, 800)["state_type"] == "COMPLETED", deployed.told
    told = "\n".join(deployed.logs(run) for run in asked)
    assert len(set(re.findall(r"Worker '(\S+ \S+)' submitting", told))) == 2
    states = [tasks_of(deployed, run) for run in asked]
    for stage, times in {"prepare": 1, "pack": 1, "train": 8, "export": 8}.items():
        told = [s for each in states for name, s in each.items() if name.startswith(stage)]
        assert sorted(told) == ["Cached"] * (8 - times) + ["Completed"] * times, stage
    assert len(list(tmp_path.glob("prepared/prepare/*/manifest.json"))) == 1
    assert len(list(tmp_path.glob("prepared/pack/*/manifest.json"))) == 1


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_training_and_export_go_on_while_the_server_is_away_and_the_run_ends_when_it_is_back(
    tmp_path,
):
    write_chats(tmp_path / "chats.jsonl", 400)
    config = write_run(tmp_path, train={"num_train_epochs": 25, "save_steps": 0})
    server = Prefect(tmp_path / "prefect")
    try:
        server.start()
        process = server.spawn([*FLOW, str(config)], "by-hand")
        bar = {"artifacts": {"key": {"any_": ["penstock-progress"]}}}
        soon(lambda: server.ask("artifacts", **bar), 200)
        server.kill()
        soon(lambda: list(tmp_path.glob("artifacts/export/*/manifest.json")), 300)
        server.start()
        told = tmp_path / "prefect" / "by-hand.log"
        assert process.wait(timeout=300) == 0, told.read_text()
        [run] = server.ask("flow_runs")
        assert run["state_type"] == "COMPLETED"
        assert "the table of train could not be shown" in told.read_text()
    finally:
        server.stop()
