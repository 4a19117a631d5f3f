"""What a run under Prefect leaves on disk, which processes belong to it, and what it told."""

import json
from contextlib import suppress
from pathlib import Path

from penstock.core.cache.manifest import MANIFEST
from penstock.core.cache.stage import ATTEMPT
from tests.flows.server import Prefect

PLACES = {
    "prepare": "prepared/prepare/*",
    "pack": "prepared/pack/*",
    "train": "out",
    "export": "artifacts/export/*",
}
"""Where the stages of `write_run` leave their results."""


GONE_SECONDS = 40
"""How long processes may stay after a run is cancelled."""


def tasks_of(prefect: Prefect, run: str) -> dict[str, str]:
    """The state of each task of a flow run, by the task's name."""
    wanted = {"id": {"any_": [run]}}
    return {t["name"]: t["state_name"] for t in prefect.ask("task_runs", flow_runs=wanted)}


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
        if its[-2:-1]
        and its[-2].endswith(b"job.json")
        and b"penstock.engine.launch.torchrun_agent" not in its
    ]
    return rank
