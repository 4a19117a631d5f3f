"""Dry runs of evaluation, scoring, generation and saving: no tensor on the wrong device."""

from pathlib import Path

import pytest

from tests.dryrun.cases import CASES
from tests.dryrun.paths import run_paths

pytestmark = pytest.mark.slow

PATHS = {
    "score_completions": ["tp, orpo"],
    "generate": ["tp"],
    "save": ["one device, lora"],
    "server_step": ["ep, lora"],
}
MORE = {
    "evaluate": ["fsdp", "1f1b", "one device", "tp", "ep", "ring", "zbv"],
    "score_completions": ["fsdp, dpo", "1f1b, dpo, lora"],
    "generate": ["1f1b", "ep", "fsdp, lora", "one device, qlora"],
    "save": ["one device"],
    "server_step": ["one device, lora", "tp", "1f1b"],
    "stage_checkpoint": ["fsdp", "one device", "ep", "fsdp, optimizer on the host"],
}
"""Further layouts of the same."""


@pytest.mark.parametrize(
    ("path", "layouts"),
    [
        *PATHS.items(),
        *(pytest.param(*more, marks=pytest.mark.exhaustive) for more in MORE.items()),
    ],
)
def test_a_path_beside_training_has_no_fault(tmp_path: Path, path: str, layouts: list[str]) -> None:
    jobs = [job for name in layouts for job in CASES[name].jobs(tmp_path / name)]
    found = run_paths(path, jobs)
    assert [each["faults"] for each in found] == [[] for _ in jobs]
    assert all(each["launches"] for each in found)
