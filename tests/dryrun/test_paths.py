"""Dry runs of evaluation, scoring, generation and saving: no tensor on the wrong device."""

from collections.abc import Mapping

import pytest

from tests.dryrun.cases import CASES
from tests.dryrun.paths import run_paths
from tests.turns import EVERY, todays

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


def pairs(layouts: Mapping[str, list[str]]) -> list[tuple[str, str]]:
    return [(path, name) for path, names in layouts.items() for name in names]


TODAY = pairs(PATHS) if EVERY else todays(pairs(PATHS), 2)
FURTHER = [step for step in pairs(PATHS) + pairs(MORE) if step not in TODAY]

Found = dict[tuple[str, str], list[Mapping[str, object]]]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What is asked for, in one start of the processes."""
    specs = [
        item.callspec
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function)
    ]
    asked = {(spec.params.get("path"), spec.params.get("layout")) for spec in specs}
    steps = [
        (pair, job)
        for pair in pairs(PATHS) + pairs(MORE)
        if pair in asked
        for job in CASES[pair[1]].jobs(tmp_path_factory.mktemp("path"))
    ]
    found: Found = {}
    results = run_paths([(path, job) for (path, _), job in steps])
    for (pair, _), result in zip(steps, results, strict=True):
        found.setdefault(pair, []).append(result)
    return found


@pytest.mark.parametrize(
    ("path", "layout"),
    [
        *TODAY,
        *(pytest.param(*step, marks=pytest.mark.exhaustive) for step in FURTHER),
    ],
)
def test_a_path_beside_training_has_no_fault(found: Found, path: str, layout: str) -> None:
    for rank in found[path, layout]:
        assert rank["faults"] == []
        assert rank["launches"]
