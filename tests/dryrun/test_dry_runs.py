"""Dry runs of small models in many layouts: no faults, and the counts of the golden file."""

import json

import pytest

from penstock.dryrun.summary import DryRun
from tests.dryrun.cases import CASES, GOLDEN, counts
from tests.dryrun.layouts import dry_runs

pytestmark = pytest.mark.slow

SMALL = {
    name: case
    for name, case in CASES.items()
    if name in ("fsdp", "tp, sequence parallel", "ring x ulysses", "1f1b x tp", "ep x 1f1b", "zbv")
}


@pytest.fixture(scope="module")
def found() -> dict[str, DryRun]:
    return dry_runs(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_layout_has_no_fault(found: dict[str, DryRun], name: str) -> None:
    assert dict(found[name].faults) == {}


@pytest.mark.parametrize("name", CASES)
def test_launches_copies_syncs_and_collectives_are_those_of_the_golden_file(
    found: dict[str, DryRun], name: str
) -> None:
    """`python -m tests.dryrun.cases` writes it again, so that a change shows as a diff."""
    assert counts(found[name]) == json.loads(GOLDEN.read_text())[name]


@pytest.mark.exhaustive
def test_all_ranks_of_a_layout_issue_matching_collectives() -> None:
    for name, one in dry_runs(SMALL, "all").items():
        assert len(one.ranks) == one.dims.world_size
        assert dict(one.faults) == {}, name


def test_ranks_of_one_stage_do_the_same() -> None:
    """So that one of them stands for all."""
    [one] = dry_runs({"1f1b x tp": CASES["1f1b x tp"]}, "all").values()
    each = one.dims.world_size // one.dims.pipeline
    for stage in range(one.dims.pipeline):
        alike = one.ranks[stage * each : (stage + 1) * each]
        assert len({rank.result.peak for rank in alike}) == 1
        # One of the ranks of a tensor-parallel group reports the loss, the others zero.
        assert max(rank.launches for rank in alike) <= min(rank.launches for rank in alike) + 1
