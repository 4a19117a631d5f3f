"""Dry runs of evaluation, scoring, generation and saving: no tensor on the wrong device."""

from pathlib import Path

import pytest

from tests.dryrun.cases import CASES
from tests.dryrun.paths import run_paths

pytestmark = pytest.mark.slow

LAYOUTS = ["one device", "fsdp", "tp", "1f1b", "ep"]

PATHS = {
    "evaluate": [*LAYOUTS, "ring", "zbv"],
    "score_completions": ["fsdp, dpo", "tp, orpo", "1f1b, dpo, lora"],
    "generate": ["tp", "1f1b", "ep", "fsdp, lora", "one device, qlora"],
    "save": ["one device", "one device, lora"],
    "server_step": ["one device, lora", "tp", "1f1b", "ep, lora"],
    "stage_checkpoint": ["one device", "fsdp", "fsdp, optimizer on the host", "ep"],
}


@pytest.mark.parametrize("path", PATHS)
def test_a_path_beside_training_has_no_fault(tmp_path: Path, path: str) -> None:
    jobs = [job for name in PATHS[path] for job in CASES[name].jobs(tmp_path / name)]
    found = run_paths(path, jobs)
    assert [each["faults"] for each in found] == [[] for _ in jobs]
    assert all(each["launches"] for each in found)
