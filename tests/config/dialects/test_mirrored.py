"""All config files of mirrors of other tools' repositories, whose folder PENSTOCK_MIRRORS names."""

import os
from pathlib import Path

import pytest

from penstock.config.translate.translation import FATAL
from tests.config.dialects.changed import draw, is_told
from tests.config.dialects.mirrors import extract
from tests.config.dialects.published import Judge, Outcome, translate_all

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3000)]

LEAST = 0.95
"""Share of the written configs that pass `penstock check`, of all of them and of those of files
that `penstock run` starts; docs/migrate/published.md says which do not, and why."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[Outcome]:
    mirrors = os.environ.get("PENSTOCK_MIRRORS")
    if not mirrors:
        pytest.skip("PENSTOCK_MIRRORS names no folder with mirrors of other tools")
    folder = tmp_path_factory.mktemp("corpus")
    extract(Path(mirrors), folder)
    found = [outcome for project in folder.iterdir() for outcome in translate_all(project)]
    return [outcome for outcome in found if outcome.translation]


def test_every_key_has_a_line_and_most_configs_pass_a_check(outcomes, tmp_path):
    assert not [outcome for outcome in outcomes if outcome.missing]
    judge = Judge(tmp_path)
    verdicts = [judge.check(outcome) for outcome in outcomes]
    assert not [verdict for verdict in verdicts if verdict.is_crash]
    assert all(verdict.reasons for verdict in verdicts if verdict.code)
    without = [
        verdict
        for outcome, verdict in zip(outcomes, verdicts, strict=True)
        if not outcome.translation.of(*FATAL)
    ]
    for judged in (verdicts, without):
        assert sum(not verdict.code for verdict in judged) >= LEAST * len(judged)


@pytest.mark.parametrize("seed", [1, 2])
def test_changed_copies_are_told(outcomes, seed, tmp_path):
    judge, changes = Judge(tmp_path), draw(outcomes, 100, seed)
    silent = [change for change in changes if not is_told(change, judge)]
    assert not [f"{change.file.name} {change.what}" for change in silent]
