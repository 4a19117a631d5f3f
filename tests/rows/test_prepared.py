"""Prepared samples of every kind, as they are read back."""

import numpy as np
import pytest

from penstock.core.files import write_json
from penstock.prepare.plan import build_plan, summarize_plan
from penstock.prepare.select.select import select
from penstock.prepare.split import publish_splits
from penstock.rows.prepared import PLAN, PreparedSamples
from tests.stages.finished import finished, settings

PAIRS = [[1, 2, None, 1, 3, 4], [5, 6, 7, None, 5], [8, None, 9]]
JUDGED = [[1, 2, 3], [0, 4], [1, 5]]


def prepared(folder, samples, kind, **more):
    entries = [finished(folder.with_name(f"{folder.name}-slices"), samples, kind=kind)]
    wishes = settings(kind=kind, **more)
    selection = select(entries, wishes)
    publish_splits(entries, selection, wishes, folder)
    plan = build_plan(entries, selection, wishes)
    write_json(folder / PLAN, plan)
    return summarize_plan(plan), PreparedSamples(folder, "train")


@pytest.mark.parametrize("more", [{}, {"num_dataset_shards_to_save": 2}])
def test_a_pair_is_read_back_with_both_sides_and_is_as_long_as_the_longer(more, tmp_path):
    facts, samples = prepared(tmp_path, PAIRS, "preference", **more)
    assert samples.lengths().tolist() == [3, 3, 1]
    assert samples.trained().tolist() == [3, 2, 0]
    found = []
    for index in range(3):
        sample = samples.sample(index)
        assert sample.desirable is None
        sides = [ids.tolist() for ids, _ in sample.sides.values()]
        found.append([*sides[0], None, *sides[1]])
        assert list(sample.sides) == ["chosen", "rejected"]
    assert found == PAIRS
    assert facts["kind"] == "preference"
    if more:  # else the tokenizer's own tally is told
        assert facts["tokens"]["train"] == 11
        assert facts["lengths"]["train"] == {"1": 1, "4": 2}


def test_a_judged_answer_is_read_back_with_its_judgement(tmp_path):
    _, samples = prepared(tmp_path, JUDGED, "kto", val_set_size=1)
    held = PreparedSamples(tmp_path, "validation")
    both = [split.sample(index) for split in (samples, held) for index in range(len(split))]
    found = {(sample.row, sample.desirable) for sample in both}
    assert found == {(0, True), (1, False), (2, True)}
    assert np.array_equal(held.epochs()[0], [0])
    for split in (samples, held):
        flags = [split.sample(index).desirable for index in range(len(split))]
        assert split.desirable().tolist() == flags
        assert split.desirable().dtype == np.bool_
