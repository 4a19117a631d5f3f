"""What is held out: judged by the records themselves, which carry a number and a group."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.files import read_json
from penstock.prepare.select.select import select, validation_masks
from penstock.rows.arrow import map_batches
from tests.cli.command import penstock, small_run, told
from tests.stages.finished import finished, settings

DATASET = {"path": "rows.jsonl", "type": "text"}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def prepare(folder: Path, rows: list[dict[str, str]], **data: object):
    config = small_run(folder, data={"datasets": [DATASET], **data})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return penstock("prepare", config, "--json")


def split_rows(folder: Path, split: str) -> list[int]:
    """Numbers of the records in a split."""
    [plan] = (folder / "data" / "prepare").glob("*/plan.json")
    files = [plan.parent / entry["file"] for entry in read_json(plan)["splits"][split]]
    return [
        row for file in files for batch in map_batches(file) for row in batch["row"].to_pylist()
    ]


def test_records_with_the_same_value_are_held_out_together(tmp_path):
    users = [f"user {number % 17}" for number in range(200)]
    rows = [{"text": f"text {number}", "user": user} for number, user in enumerate(users)]
    finished = prepare(tmp_path, rows, val_set_size=30, split_by="user")
    assert finished.code == 0, finished.err
    train, validation = (split_rows(tmp_path, split) for split in ("train", "validation"))
    assert not {users[row] for row in train} & {users[row] for row in validation}
    assert sorted([*train, *validation]) == list(range(200))
    largest = max(Counter(users).values())
    assert 30 <= len(validation) < 30 + largest


def test_a_record_without_a_group_is_refused_with_its_line(tmp_path):
    rows = [{"text": "a", "user": "x"}, {"text": "b"}, {"text": "c", "user": "y"}]
    refused = prepare(tmp_path, rows, val_set_size=1, split_by="user")
    told(refused.code, refused.err, "rows.jsonl:2: the record has no value in 'user'")
    checked = penstock("check", tmp_path / "run.yaml")
    told(checked.code, checked.err, "1 of the first 3 records have no value in 'user'")


def test_a_group_split_without_a_validation_split_is_refused(tmp_path):
    refused = prepare(tmp_path, [{"text": "a", "user": "x"}] * 3, split_by="user")
    told(refused.code, refused.err, "data.split_by: is only used with val_set_size")


def test_validation_samples_that_are_trained_on_are_counted_and_a_setting_ends_it(tmp_path):
    rows = [{"text": f"text {number % 5}"} for number in range(40)]
    counted = prepare(tmp_path, rows, val_set_size=10)
    train, validation = (split_rows(tmp_path, split) for split in ("train", "validation"))
    expected = sum(row % 5 in {other % 5 for other in train} for row in validation)
    assert counted.last["stages"][0]["facts"]["validation_in_train"] == expected > 0
    assert f"{expected} of 10 validation samples have the same tokens" in counted.err
    assert "write data.deduplicate: exact" in counted.err
    mended = penstock("prepare", tmp_path / "run.yaml", "--data.deduplicate", "exact", "--json")
    # Five texts are left, and ten cannot be held out of them.
    told(mended.code, mended.err, "Set data.val_set_size (10) lower")
    options = ("--data.deduplicate", "exact", "--data.val_set_size", "2", "--json")
    mended = penstock("prepare", tmp_path / "run.yaml", *options)
    assert mended.last["stages"][0]["facts"]["validation_in_train"] == 0
    assert "same tokens" not in mended.err


def test_samples_of_a_test_set_that_are_trained_on_are_counted(tmp_path):
    train = [[1, 2, 3], [4, 5], [6, 7, 8]]
    test = [[4, 5], [1, 2, 3], [1, 2, 3], [9, 9]]
    entries = [finished(tmp_path, train), finished(tmp_path, test, "validation")]
    assert select(entries, settings()).validation_in_train == 3
    assert select(entries[:1], settings()).validation_in_train == 0


@given(
    st.lists(st.lists(st.integers(0, 5), max_size=9), min_size=1, max_size=4), st.integers(1, 30)
)
def test_a_mask_of_whole_groups_splits_no_group_and_takes_no_more_groups_than_needed(ranks, size):
    arrays = [np.array(of_slice, dtype=np.uint64) for of_slice in ranks]
    masks = validation_masks(arrays, size, whole_groups=True)
    every = [rank for of_slice in ranks for rank in of_slice]
    held = np.concatenate(masks).tolist()
    expected: set[int] = set()
    for rank in sorted(set(every)):
        if sum(other in expected for other in every) < size:
            expected.add(rank)
    assert held == [rank in expected for rank in every]
