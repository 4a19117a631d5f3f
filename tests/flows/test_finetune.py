"""Flows that report to a server: by hand, deployed, on a schedule, cancelled; no network."""

import json
import logging
import re
import secrets
import signal
import subprocess
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from filelock import FileLock

from penstock.config.loading.load import load
from penstock.core.cache.manifest import MANIFEST
from penstock.core.cache.store import lock_path
from penstock.pipeline.plan import plan
from tests.cli.command import penstock
from tests.flows.runs import (
    GONE_SECONDS,
    PLACES,
    cancel,
    is_saved,
    processes_of,
    steps_in,
    tasks_of,
)
from tests.flows.server import FLOW, Prefect
from tests.flows.test_recurring import decided
from tests.flows.test_task_runner import FILES, several_files
from tests.pipeline.runs import write_chats, write_run
from tests.pipeline.test_recurring import recurring_run
from tests.stages.prepared import contents
from tests.turns import one_day_in
from tests.waiting import soon

# pyright: reportMissingImports=false


def keys_of(folder: Path) -> dict[str, str]:
    """The first digits of every stage's key, from what lies on disk."""
    manifests = {name: next(folder.glob(f"{at}/{MANIFEST}")) for name, at in PLACES.items()}
    return {name: json.loads(file.read_text())["key"][:16] for name, file in manifests.items()}


def keep_secret(prefect: Prefect, name: str, value: str) -> str:
    """A Secret block, and how the variables of a job refer to it."""
    kind = prefect.api.get("/block_types/slug/secret").json()["id"]
    wanted = {"block_schemas": {"block_type_id": {"any_": [kind]}}}
    schema = prefect.ask("block_schemas", **wanted)[0]["id"]
    block = {"name": name, "block_type_id": kind, "block_schema_id": schema}
    made = prefect.post("/block_documents/", {**block, "data": {"value": value}})
    assert made.status_code == 201, made.text
    return f"{{{{ prefect.blocks.secret.{name} }}}}"


@pytest.fixture(scope="module")
def once(deployed, tmp_path_factory):
    """(folder, config, flow run) of a run that was asked for, and that had to wait for its data."""
    folder = tmp_path_factory.mktemp("deployed")
    config = write_run(folder, pipeline={"name": "nightly run"})
    prepared = plan(load(config)).step("prepare").path
    prepared.parent.mkdir(parents=True)
    with FileLock(lock_path(prepared)):  # as another run has it that builds this
        asked = deployed.submit(
            "finetune/finetune", config=str(config), overrides={"train.lr": 2e-2}
        )
        notices = {"artifacts": {"key": {"any_": ["penstock-notice"]}}}
        [notice] = soon(lambda: deployed.ask("artifacts", **notices), every=0.5)
    assert notice["data"] == f"{prepared} is being built by another run; waiting for it"
    assert notice["description"] == "nightly run: prepare"
    run = deployed.ended(asked)
    assert run["state_type"] == "COMPLETED", deployed.told
    return folder, config, run


@one_day_in(3, of=0)
def test_a_deployed_run_is_named_after_what_runs_and_shows_its_stages_and_what_they_wait_for(
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
    assert {f"penstock-{name}" for name in PLACES} < set(found)
    assert float(found["penstock-progress"]["data"]) == 100
    assert f"| step | {steps} of {steps} (100.0%) |" in found["penstock-training"]["data"]
    assert (folder / "out" / "report.html").as_uri() in found["penstock-report"]["data"]


@pytest.mark.slow
def test_the_log_of_a_deployed_run_has_steps_evaluations_and_warnings_under_the_task_that_trains(
    deployed, once
):
    folder, _, run = once
    here = {"id": {"any_": [run["id"]]}}
    [train] = [
        each["id"]
        for each in deployed.ask("task_runs", flow_runs=here)
        if each["name"].startswith("train")
    ]
    steps = json.loads((folder / "out" / "manifest.json").read_text())["facts"]["steps"]
    last = steps_in(folder)[-1]
    assert last == steps

    def logged() -> dict[str, int]:
        found = deployed.ask("logs", logs={"task_run_id": {"any_": [train]}})
        return {line["message"]: line["level"] for line in found}

    def level_of(beginning: str) -> int | None:
        told = logged().items()
        return next((level for text, level in told if text.startswith(beginning)), None)

    assert soon(lambda: level_of(f"step {steps} of {steps}: loss "), 20) == logging.INFO
    assert level_of(f"step {steps}: eval_loss ") == logging.INFO
    assert level_of("attention: ") == logging.INFO
    assert level_of(f"warning: the run is {steps} optimizer steps") == logging.WARNING
    # The terminal of a worker, where ranks print the same, does not repeat it.
    terminal = (deployed.home / "worker-1.log").read_text()
    assert f"step {steps} of {steps}: loss " not in terminal


@pytest.mark.slow
def test_the_overview_of_a_run_has_its_stages_its_losses_and_the_command_that_comes_next(
    deployed, once
):
    folder, config, run = once
    artifacts = deployed.ask("artifacts", flow_runs={"id": {"any_": [run["id"]]}})
    [overview] = [each for each in artifacts if each["key"] == "penstock-run"]
    facts = json.loads((folder / "out" / "manifest.json").read_text())["facts"]
    assert f"{facts['steps']} steps, loss " in overview["description"]
    for stage, key in keys_of(folder).items():
        [place] = [path.parent for path in folder.glob(f"{PLACES[stage]}/{MANIFEST}")]
        [row] = re.findall(rf"\| {stage} \| (.*) \|", overview["data"])
        result, seconds, told, where = row.split(" | ")
        assert (result, told, where) == ("built", f"`{key}`", str(place))
        assert seconds.endswith(" s")
    assert f"| tokens | {facts['tokens']:,} |" in overview["data"]
    assert f" {facts['final_loss']:.4g} at last |" in overview["data"]
    assert f"| held-out loss (eval_loss) | {facts['eval_loss']:.4g} |" in overview["data"]
    assert f"| report | {folder / 'out' / 'report.html'} |" in overview["data"]
    assert f"    penstock chat {config} --train.lr 0.02" in overview["data"]


@pytest.mark.slow
def test_the_overview_of_a_run_that_fails_says_how_far_it_came_and_why(reporting, tmp_path):
    import finetune

    config = write_run(tmp_path, train={"load_checkpoint_path": "auto", "require_checkpoint": True})
    state = finetune.finetune(config, return_state=True)
    assert state.is_failed()
    shown = reporting.ask("artifacts", artifacts={"key": {"any_": ["penstock-run"]}})
    [overview] = [each for each in shown if str(tmp_path) in each["data"]]
    assert "| pack | built |" in overview["data"]
    assert "| train | not done |" in overview["data"]
    assert "**Failed:**" in overview["data"]
    assert "penstock chat" not in overview["data"]


@one_day_in(3, of=2)
def test_a_schedule_fires_and_what_is_there_is_shown_as_cached(deployed, once):
    folder, config, _ = once
    tracker = folder / "out" / "trackers" / "mlflow.json"
    tracker.parent.mkdir()
    tracker.write_text(json.dumps({"url": "https://mlflow.example/#/runs/1"}))
    there = deployed.api.get("/deployments/name/finetune/finetune").json()
    first = datetime.now(UTC) + timedelta(seconds=3)
    made = deployed.post(
        f"/deployments/{there['id']}/schedules",
        [
            {
                "schedule": {"interval": 30, "anchor_date": first.isoformat()},
                "parameters": {"config": str(config), "overrides": {"train.lr": 0.02}},
            }
        ],
    )
    assert made.status_code == 201, made.text
    begun = {"state": {"type": {"any_": ["PENDING", "RUNNING", "COMPLETED"]}}}
    here = {"id": {"any_": [there["id"]]}}

    def fired() -> list[dict]:
        found = deployed.ask("flow_runs", deployments=here, flow_runs=begun)
        return [each for each in found if each["auto_scheduled"]]

    [run, *_] = soon(fired, every=0.5)
    deployed.api.delete(f"/deployments/{there['id']}/schedules/{made.json()[0]['id']}")
    run = deployed.ended(run["id"])
    assert run["state_type"] == "COMPLETED", deployed.told
    expected = {f"{name} {key}": "Cached" for name, key in keys_of(folder).items()}
    assert soon(lambda: (found := tasks_of(deployed, run["id"])) == expected and found, 20)
    artifacts = deployed.ask("artifacts", flow_runs={"id": {"any_": [run["id"]]}})
    found = {artifact["key"]: artifact["data"] for artifact in artifacts}
    assert {"penstock-report", *(f"penstock-{name}" for name in PLACES)} < set(found)
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


@one_day_in(3, of=1)
def test_a_cancelled_run_leaves_a_checkpoint_no_process_and_nothing_of_its_secrets(
    deployed, once, tmp_path
):
    _, config, _ = once
    endless = {
        "train.output_dir": str(tmp_path / "out"),
        "train.num_train_epochs": 20_000,
        "train.save_steps": 0,
        "train.use_wandb": False,
    }
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
    parameters = {"config": str(config), "overrides": endless}
    asked = {"parameters": parameters, "job_variables": {"env": env}}
    run = deployed.post(f"/deployments/{there['id']}/create_flow_run", asked).json()["id"]
    soon(lambda: steps_in(tmp_path), 200)
    token = f"HF_TOKEN={planted['HF_TOKEN']}".encode()
    given = [token in Path(f"/proc/{pid}/environ").read_bytes() for pid in processes_of(run)]
    # The flow has it; ranks, which ask no hub, have not.
    assert any(given)
    assert not all(given)
    cancel(deployed, run)
    soon(lambda: not processes_of(run), GONE_SECONDS)
    assert is_saved(tmp_path)
    soon(lambda: deployed.api.get(f"/flow_runs/{run}").json()["state_type"] == "CANCELLED", 20)

    told = penstock("run", config, "--data.datasets.0.path", refused)
    named = penstock("run", config, f"--launch.env.HF_TOKEN={planted['HF_TOKEN']}")
    assert (told.code, named.code) == (3, 2)
    said = told.out + told.err + named.out + named.err

    def holding(value: str) -> list[Path]:
        written = (path for folder in (tmp_path, deployed.home) for path in folder.rglob("*"))
        return [path for path in written if path.is_file() and value.encode() in path.read_bytes()]

    assert any(path.name.startswith("prefect.db") for path in holding(str(config)))
    for value in (*planted.values(), refused[9:41]):
        assert value not in said
        assert holding(value) == []


@pytest.mark.slow
def test_a_tick_is_a_flow_run_whose_state_and_table_say_what_was_decided(reporting, tmp_path):
    import recurring

    config = recurring_run(tmp_path / "run", pipeline={"name": "a bot"})
    state = recurring.recurring(config, {"release.train_when": "never"}, return_state=True)
    assert state.name == "Held"
    [run] = reporting.ask("flow_runs", flows={"name": {"any_": ["recurring"]}})
    assert run["state_name"] == "Held"
    [decision] = decided(tmp_path / "run")
    assert (decision["verdict"], decision["new_samples"]) == ("paused", 24)
    artifacts = reporting.ask("artifacts", flow_runs={"id": {"any_": [run["id"]]}})
    found = {each["key"]: each for each in artifacts}
    shown = found["penstock-releases-bot"]
    assert shown["description"] == decision["line"]
    assert [row["verdict"] for row in json.loads(shown["data"])] == ["paused"]
    assert "penstock-prepare" in found


def prepared_in(folder: Path) -> dict[str, bytes]:
    """All files of the one prepared artifact but its manifest, which tells when and where."""
    [manifest] = folder.glob("prepared/prepare/*/manifest.json")
    found = contents(manifest.parent)
    del found["manifest.json"]
    return {f"{manifest.parent.name}/{name}": content for name, content in found.items()}


def shares_of(prefect: Prefect) -> list[dict]:
    """What each share of the slices came to that a flow dealt out last."""
    [shown] = prefect.ask(
        "artifacts", artifacts={"key": {"any_": ["penstock-prepare-shares"]}}, limit=1
    )
    return json.loads(shown["data"])


@pytest.mark.exhaustive
def test_two_dask_workers_prepare_every_slice_once_and_the_result_is_the_command_lines(
    dask_of_two_processes, reporting, tmp_path, monkeypatch
):
    import finetune

    spread = several_files(
        tmp_path / "spread",
        task_runner="dask",
        task_runner_address=dask_of_two_processes,
        task_runner_workers=4,
    )
    monkeypatch.chdir(spread.parent)
    finetune.finetune(Path("run.yaml"))
    shares = shares_of(reporting)
    assert len({share["worker"] for share in shares}) == 2
    assert sum(share["slices"] for share in shares) == FILES
    assert sum(share["done"] for share in shares) == FILES
    assert len(list(tmp_path.glob("spread/prepared/slices/*.arrow"))) == FILES

    alone = several_files(tmp_path / "alone")
    monkeypatch.chdir(alone.parent)
    assert penstock("prepare", "run.yaml").code == 0
    assert prepared_in(spread.parent) == prepared_in(alone.parent)


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("prefect_ray"), reason="prefect-ray is not installed")
def test_ray_prepares_every_slice_once(prefect, tmp_path):
    spread = several_files(tmp_path / "spread", task_runner="ray", task_runner_workers=2)
    prefect.run(*FLOW, "run.yaml", cwd=spread.parent)
    assert sum(share["done"] for share in shares_of(prefect)) == FILES


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
