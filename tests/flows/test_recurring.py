"""Fine-tuning again and again on a schedule of Prefect that fires."""

import json
from pathlib import Path

import pytest

from tests.cli.command import penstock
from tests.flows.server import PREFECT, Prefect
from tests.pipeline.runs import write_chats
from tests.pipeline.test_recurring import recurring_run
from tests.waiting import soon


def decided(folder: Path) -> list[dict]:
    file = folder / "artifacts/releases/bot/decisions.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def runs_by_state(prefect: Prefect) -> list[str]:
    """The states of all runs of the flow that are over, the oldest first."""
    wanted = {"name": {"any_": ["recurring"]}}
    found = prefect.ask("flow_runs", flows=wanted, sort="EXPECTED_START_TIME_ASC")
    return [run["state_name"] for run in found if run["end_time"]]


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_a_schedule_trains_skips_and_trains_on_what_has_come(deployed, tmp_path):
    folder = tmp_path / "run"
    config = recurring_run(folder)
    latest = folder / "artifacts/releases/bot/latest"

    def waiting_for(verdict: str, count: int) -> list[dict]:
        found = [each for each in decided(folder) if each["verdict"] == verdict]
        return found if len(found) >= count else []

    deployed.run(
        *(PREFECT, "--no-prompt", "deploy", "flows/recurring.py:recurring", "--name", "grows"),
        *("--pool", "penstock", "--param", f"config={config}", "--interval", "30"),
        *("--concurrency-limit", "1", "--collision-strategy", "CANCEL_NEW"),
    )
    try:
        [first] = soon(lambda: waiting_for("released", 1), 400)
        assert str(latest.readlink()) == "0001"
        [skipped, *_] = soon(lambda: waiting_for("up_to_date", 1), 200)
        assert (skipped["release"], skipped["new_samples"]) == (1, 0)
        write_chats(folder / "data" / "b.jsonl", 16, salt=" twice")
        [_, second] = soon(lambda: waiting_for("released", 2), 400)
        assert str(latest.readlink()) == "0002"
        assert (first["slices"], first["reused_slices"]) == (2, 0)
        assert (second["slices"], second["reused_slices"]) == (3, 2)
        assert second["new_samples"] == 16
        assert penstock("releases", "rollback", config).code == 0
        assert str(latest.readlink()) == "0001"
        [kept, *_] = soon(lambda: waiting_for("kept", 1), 200)
        assert "0002, which is withdrawn" in kept["line"]
        # The decision is written before its run ends.
        soon(lambda: {"Released", "UpToDate", "Kept"} <= set(runs_by_state(deployed)), 60)
    finally:
        there = deployed.api.get("/deployments/name/recurring/grows").json()
        deployed.api.patch(f"/deployments/{there['id']}", json={"paused": True})
